"""Reads the quantisation of NVIDIA ModelOpt's checkpoints: weights in FP8. Knows nothing of tensors.

ModelOpt writes the same settings twice: `quantization` in hf_quant_config.json, and in newer versions
`quantization_config` in config.json, in which some fields have other names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Any

from workers.specs.compressed_tensors import FP8, is_fp8
from workers.specs.weight_map import Fp8Form, Scaling

METHOD = "modelopt"
# Scales of activations are stored beside weights with one scale a tensor.
FORMS: dict[str | None, Fp8Form | None] = {
    "FP8": Fp8Form(Scaling.TENSOR, "_scale", input_scale=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Form(Scaling.CHANNEL, "_scale"),
    None: None,  # the cache alone is quantised
}
EXCLUDED = ("exclude_modules", "ignore")  # in hf_quant_config.json, and in config.json
CACHE = ("kv_cache_quant_algo", "kv_cache_scheme")
IGNORED = ("quant_method", "quant_algo", "producer", "config_groups", *EXCLUDED, *CACHE)


@dataclass(frozen=True)
class ModelOpt:
    """FP8 in one form; None: weights are not quantised.

    excluded       names of modules that are not quantised, with the modules below; * stands for any text
    cache_scales   scales of cached K and V are stored, which are not read
    """

    stored: Fp8Form | None
    excluded: tuple[str, ...] = ()
    cache_scales: bool = False

    @cached_property
    def _excluded(self) -> re.Pattern[str]:
        patterns = [translate(part) for name in self.excluded for part in (name, f"{name}.*")]
        return re.compile("|".join(patterns) or r"(?!)")

    def form(self, tensor: str) -> Fp8Form | None:
        """Return the form, None if the tensor's module is excluded."""
        return None if self._excluded.match(tensor.rpartition(".")[0]) else self.stored


def parse_modelopt(found: Mapping[str, Any], key: str, problems: list[str]) -> ModelOpt:
    """Return the quantisation; complaints that begin with `key` go to `problems`."""
    algorithm = found.get("quant_algo")
    if not (algorithm is None or isinstance(algorithm, str)) or algorithm not in FORMS:
        wanted = ", ".join(name for name in FORMS if name)
        problems.append(
            f"{key}.quant_algo is {algorithm!r}, a format of ModelOpt; supported: {wanted}"
        )
        return ModelOpt(None)
    for name, value in found.items():
        if name not in IGNORED and value is not None:
            problems.append(f"{key}.{name} is {value!r}; unknown key that may change the weights")
    _check_groups(found.get("config_groups"), f"{key}.config_groups", problems)
    cache = [name for name in CACHE if found.get(name) is not None]
    for name in cache:
        value = found[name]
        if value != "FP8" and not is_fp8(value):
            problems.append(f"{key}.{name} is {value!r}; supported: FP8 or null")
    excluded = [
        module for name in EXCLUDED for module in _names(found.get(name), f"{key}.{name}", problems)
    ]
    return ModelOpt(FORMS[algorithm], tuple(excluded), bool(cache))


def _check_groups(groups: Any, key: str, problems: list[str]) -> None:
    """Complain about groups of other weights than FP8: `quant_algo` holds for all projections."""
    if groups is not None and not isinstance(groups, Mapping):
        problems.append(f"{key} is {groups!r}; expected an object")
        return
    for name, group in (groups or {}).items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not is_fp8(weights):
            problems.append(f"{key}.{name}.weights is {weights!r}; supported: {FP8}")


def _names(value: Any, key: str, problems: list[str]) -> list[str]:
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.append(f"{key} is {value!r}; expected a list of module names")
        return []
    return names
