"""Reads the `quantization_config` of compressed-tensors checkpoints: FP8 or four bits, in groups of modules.

A group has targets. Weights in FP8 have one scale a tensor, a row ("channel") or a block of 128 x 128; weights in four
bits have one for each group of a row's values. Activations are not quantised as the checkpoint proposes: products run
in 16 bits or more, or with scales computed from the activations.
Knows nothing of tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kernels.four_bit_format import GROUPS, FourBitFormat
from workers.specs.four_bit import FourBitForm, Packing
from workers.specs.weight_map import Fp8Form, Scaling

PATTERN = "re:"  # begins a regular expression in the place of a name
ALL_PROJECTIONS = "Linear"  # every projection is an instance of this class in transformers
SUFFIX = "_scale"
STRATEGIES = {
    "tensor": Scaling.TENSOR,
    "channel": Scaling.CHANNEL,
    "block": Scaling.BLOCK,
}
FP8_FORMATS = (None, "float-quantized", "naive-quantized", "mixed-precision")
# Supported values; None stands for null and for a missing field.
FIELDS: dict[str, tuple[Any, ...]] = {
    "format": (*FP8_FORMATS, "pack-quantized"),
    "quantization_status": (None, "compressed", "frozen"),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
CACHE = "kv_cache_scheme"
# Read apart from FIELDS, or of bookkeeping.
IGNORED = (
    *("config_groups", "ignore", CACHE),
    *("quant_method", "version", "global_compression_ratio"),
)
WEIGHT_FIELDS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (None, True),
    "dynamic": (None, False),
    "actorder": (None,),
    "group_size": (None,),
    "strategy": tuple(STRATEGIES),
}
FOUR_BIT_FIELDS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True, False),
    "dynamic": (None, False),
    "strategy": ("group",),
    "group_size": GROUPS,
    "block_structure": (None,),
    "actorder": (None, False, True, "group", "dynamic", "weight", "static"),
}
FP8 = {"num_bits": 8, "type": "float"}
OBSERVERS = ("block_structure", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
ORDERED = (True, "group", "dynamic")  # values of actorder that give each matrix an order of columns


@dataclass(frozen=True)
class Group:
    """Modules that `targets` names, stored in one form."""

    targets: tuple[str, ...]
    form: Fp8Form | FourBitForm


@dataclass(frozen=True)
class CompressedTensors:
    """Groups of modules. The first group that names a module decides, before groups of all projections.

    ignored        names or patterns of modules that are not quantised
    cache_scales   scales of cached K and V are stored, which are not read
    """

    groups: tuple[Group, ...]
    ignored: tuple[str, ...] = ()
    cache_scales: bool = False

    @cached_property
    def _ignored_names(self) -> frozenset[str]:
        return frozenset(self.ignored)

    @cached_property
    def _ignored_patterns(self) -> list[str]:
        return [name for name in self.ignored if name.startswith(PATTERN)]

    def form(self, tensor: str) -> Fp8Form | FourBitForm | None:
        """Return how the projection of this name is stored, None if no group has its module."""
        module = tensor.rsplit(".", 1)[0]
        if module in self._ignored_names:  # lists of releases have hundreds of names
            return None
        if any(_names(pattern, module) for pattern in self._ignored_patterns):
            return None
        for group in self.groups:
            if any(_names(target, module) for target in group.targets):
                return group.form
        return next((g.form for g in self.groups if ALL_PROJECTIONS in g.targets), None)


def parse_compressed_tensors(
    found: Mapping[str, Any], key: str, problems: list[str]
) -> CompressedTensors:
    """Return the quantisation; complaints that begin with `key` go to `problems`."""
    _check(found, FIELDS, key, problems, ignored=IGNORED)
    given = found.get("config_groups")
    if not isinstance(given, Mapping) or not given:
        problems.append(
            f"{key}.config_groups is {given!r}; expected an object with a group or more"
        )
        given = {}
    groups = tuple(
        _parse_group(group, f"{key}.config_groups.{name}", found.get("format"), problems)
        for name, group in given.items()
    )
    cache = found.get(CACHE)
    if cache is not None and not is_fp8(cache):
        problems.append(f"{key}.{CACHE} is {cache!r}; supported: null or {FP8}")
    return CompressedTensors(groups, _patterns(found, "ignore", key, problems), cache is not None)


def is_fp8(scheme: Any) -> bool:
    """Return whether a description of quantised values, maybe with more fields, is one of FP8."""
    return isinstance(scheme, Mapping) and all(scheme.get(key) == FP8[key] for key in FP8)


def _parse_group(group: Any, key: str, form: Any, problems: list[str]) -> Group:
    """Return a group; `form` is the format of groups without their own."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        problems.append(f"{key}.weights is {weights!r}; expected an object")
        return Group((), Fp8Form(Scaling.TENSOR, SUFFIX))
    _check(group, {"output_activations": (None,), "format": FIELDS["format"]}, key, problems)
    targets = _patterns(group, "targets", key, problems)
    own = form if group.get("format") is None else group["format"]
    if weights.get("num_bits") == 4:
        return Group(targets, _parse_four_bit(weights, key, own, problems))
    _check({"format": own}, {"format": FP8_FORMATS}, key, problems)
    _check(weights, WEIGHT_FIELDS, f"{key}.weights", problems, ignored=OBSERVERS)
    scaling = STRATEGIES.get(str(weights.get("strategy")), Scaling.TENSOR)
    blocks = (None,) if scaling != Scaling.BLOCK else ([128, 128], "128x128")
    _check(weights, {"block_structure": blocks}, f"{key}.weights", problems, closed=False)
    inputs = group.get("input_activations")
    static = isinstance(inputs, Mapping) and inputs.get("dynamic") is False
    return Group(targets, Fp8Form(scaling, SUFFIX, static))


def _parse_four_bit(
    weights: Mapping[str, Any], key: str, form: Any, problems: list[str]
) -> FourBitForm:
    _check(weights, FOUR_BIT_FIELDS, f"{key}.weights", problems, ignored=OBSERVERS)
    if form != Packing.COMPRESSED:
        problems.append(f"{key} has 4 bits in the format {form!r}; supported: {Packing.COMPRESSED}")
    group, ordered = weights.get("group_size"), weights.get("actorder") in ORDERED
    return FourBitForm(
        Packing.COMPRESSED,
        FourBitFormat(
            "int4",
            group if group in GROUPS else GROUPS[0],
            weights.get("symmetric") is False,
            ordered,
        ),
    )


def _check(
    found: Mapping[str, Any],
    supported: Mapping[str, tuple[Any, ...]],
    key: str,
    problems: list[str],
    *,
    ignored: tuple[str, ...] = ("weights", "input_activations", "targets"),
    closed: bool = True,
) -> None:
    """Complain about other values than the supported ones; `closed`: about other fields too."""
    for field, values in supported.items():
        value = found.get(field)
        if not any(value == good and type(value) is type(good) for good in values):
            wanted = " or ".join("null" if good is None else str(good) for good in values)
            problems.append(f"{key}.{field} is {value!r}; supported: {wanted}")
    for field, value in found.items():
        if closed and field not in supported and field not in ignored and value is not None:
            problems.append(f"{key}.{field} is {value!r}; unknown key that may change the weights")


def _patterns(
    found: Mapping[str, Any], field: str, key: str, problems: list[str]
) -> tuple[str, ...]:
    names = found.get(field)
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.append(f"{key}.{field} is {names!r}; expected a list of names of modules")
        return ()
    for name in names:
        if name.startswith(PATTERN):
            try:
                re.compile(name.removeprefix(PATTERN))
            except re.error as error:
                problems.append(f"{key}.{field} holds {name!r}; no regular expression: {error}")
                return ()
    return tuple(names)


def _names(pattern: str, module: str) -> bool:
    """Return whether a name, or a pattern that matches from the start, is the module's."""
    if pattern.startswith(PATTERN):
        return re.match(pattern.removeprefix(PATTERN), module) is not None
    return pattern == module
