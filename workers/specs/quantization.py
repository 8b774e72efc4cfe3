"""Reads config.json's `quantization_config`: weights in FP8 or in four bits.

`quant_method: fp8` is the format of DeepSeek's and Qwen3's releases (blocks) and of older FP8 releases (one scale a
tensor). `workers.specs.compressed_tensors` reads `compressed-tensors`, `workers.specs.gptq_awq` reads `gptq` and `awq`,
`workers.specs.modelopt` reads `modelopt`. Knows nothing of tensors.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

from workers.specs.compressed_tensors import parse_compressed_tensors
from workers.specs.four_bit import FourBitForm
from workers.specs.gptq_awq import parse_awq, parse_gptq
from workers.specs.modelopt import EXCLUDED, METHOD, parse_modelopt
from workers.specs.weight_map import Fp8Form, Scaling, mapped_name

SCALE_SUFFIX = "_scale_inv"  # of blocks; other scales end in "_scale"
KEY = "quantization_config"

# The supported values of each field; None stands for null and for a missing field.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": (None, [128, 128]),
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "float", "ue8m0"),  # scales that are powers of two are scales
    "expert_dtype": (None, "fp8"),
    "dequantize": (None, False),
    "modules_to_convert": (None, []),
}
SKIPPED = ("modules_to_not_convert", "ignored_layers")
# The parsers of other methods; complaints begin with the given key.
PARSERS: dict[Any, Callable[[Mapping[str, Any], str, list[str]], "Quantization"]] = {
    "compressed-tensors": parse_compressed_tensors,
    "gptq": parse_gptq,
    "awq": parse_awq,
    METHOD: parse_modelopt,
}
# End the names of scales of cached K and V. A cache in FP8 here has a scale for each token and head instead.
CACHE_SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")


class Quantization(Protocol):
    """Which tensors of a checkpoint are stored in FP8 or in four bits, and whether it has scales of cached K and V."""

    @property
    def cache_scales(self) -> bool: ...

    def form(self, tensor: str) -> Fp8Form | FourBitForm | None:
        """Return how the projection of this name is stored; None: in a floating dtype of 16 bits or more."""


@dataclass(frozen=True)
class Fp8Quantization:
    """FP8 in one form. `skipped`: modules without, by name (with modules below) or end of name."""

    cache_scales: ClassVar[bool] = False

    stored: Fp8Form
    skipped: frozenset[str] = frozenset()

    @cached_property
    def _ends(self) -> frozenset[str]:
        """The last part of every name in `skipped`: few modules of a checkpoint have a part of this set."""
        return frozenset(name.rpartition(".")[2] for name in self.skipped)

    def form(self, tensor: str) -> Fp8Form | None:
        """Return the form, None if the tensor is excluded alone or with its module."""
        parts = tensor.split(".")[:-1]
        ends = [end for end, part in enumerate(parts, 1) if part in self._ends]
        if not ends:
            return self.stored
        names = [".".join(parts[:end]) for end in ends]
        if ends[-1] == len(parts):
            names += (".".join(parts[start:]) for start in range(1, len(parts)))
        return self.stored if self.skipped.isdisjoint(names) else None


def parse_quantization(
    raw: Mapping[str, Any], problems: list[str], renamed: Iterable[tuple[str, str]] = ()
) -> Quantization | None:
    """Return the quantisation, None if config.json has none; complaints with the field go to `problems`.

    renamed   as of ModelConfig; names of modules that are left out may be in both forms
    """
    found = raw.get(KEY)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        problems.append(f"{KEY} is {found!r}; expected a JSON object")
        return None
    found = dict(found)
    for key in (*SKIPPED, *EXCLUDED):
        if isinstance(names := found.get(key), list):
            found[key] = names + [
                mapped_name(name, renamed) for name in names if isinstance(name, str)
            ]
    method = found.get("quant_method")
    if method == "fp8":
        return _parse_fp8(found, problems)
    if method in PARSERS:
        return PARSERS[method](found, KEY, problems)
    known = ", ".join(("fp8", *PARSERS))
    problems.append(f"{KEY}.quant_method is {method!r}; supported: {known}")
    return None


def renamed_scales(quantization: Quantization | None) -> tuple[tuple[str, str], ...]:
    """Return names as of `ModelConfig.renamed`: transformers gives one scale a tensor the suffix of blocks."""
    of_tensors = (
        isinstance(quantization, Fp8Quantization) and quantization.stored.scaling == Scaling.TENSOR
    )
    return ((SCALE_SUFFIX, "_scale"),) if of_tensors else ()


def unread_scales(quantization: Quantization | None) -> tuple[str, ...]:
    """Return the ends of the names of scales that a checkpoint has and nothing here reads."""
    return CACHE_SCALES if quantization is not None and quantization.cache_scales else ()


def _parse_fp8(found: Mapping[str, Any], problems: list[str]) -> Fp8Quantization:
    blocks = found.get("weight_block_size") is not None
    # one scale a tensor: releases store scales of activations beside it, which products here do not need
    supported = (
        SUPPORTED if blocks else SUPPORTED | {"activation_scheme": (None, "dynamic", "static")}
    )
    for field, values in supported.items():
        value = found.get(field)
        if not any(value == good and type(value) is type(good) for good in values):
            wanted = " or ".join(str(good) for good in values if good is not None)
            problems.append(f"{KEY}.{field} is {value!r}; supported: {wanted}")
    for field, value in found.items():
        if field not in supported and field not in SKIPPED and value is not None:
            problems.append(f"{KEY}.{field} is {value!r}; unknown key that may change the weights")
    skipped = frozenset[str]().union(*(_parse_skipped(found, key, problems) for key in SKIPPED))
    if blocks:
        return Fp8Quantization(Fp8Form(Scaling.BLOCK, SCALE_SUFFIX), skipped)
    static = found.get("activation_scheme") == "static"
    return Fp8Quantization(Fp8Form(Scaling.TENSOR, "_scale", static), skipped)


def _parse_skipped(found: Mapping[str, Any], key: str, problems: list[str]) -> frozenset[str]:
    value = found.get(key)
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.append(f"{KEY}.{key} is {value!r}; expected a list of module names")
        return frozenset()
    patterns = [name for name in names if not name.replace(".", "").replace("_", "").isalnum()]
    if patterns:
        problems.append(f"{KEY}.{key} holds {patterns[0]!r}; supported: plain module names")
    return frozenset(names)
