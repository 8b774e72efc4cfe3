"""Reads config.json's `quantization_config`: FP8 weights in blocks, as DeepSeek's and Qwen3's releases have them.

Knows nothing of tensors. The scales of a tensor in FP8 are stored under its name and SCALE_SUFFIX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCALE_SUFFIX = "_scale_inv"
KEY = "quantization_config"

# The supported values of each field; None stands for null and for a missing field.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([128, 128],),
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "float", "ue8m0"),  # scales that are powers of two are scales
    "expert_dtype": (None, "fp8"),
    "dequantize": (None, False),
    "modules_to_convert": (None, []),
}
SKIPPED = "modules_to_not_convert"


@dataclass(frozen=True)
class BlockQuantization:
    """FP8 in blocks of 128 x 128 values. `skipped`: modules without, by name (with modules below) or end of name."""

    skipped: frozenset[str] = frozenset()

    def skips(self, tensor: str) -> bool:
        """Return whether the tensor of this name is excluded from quantisation, alone or with its module."""
        parts = tensor.split(".")[:-1]
        cuts = range(1, len(parts) + 1)
        heads, tails = (".".join(parts[:i]) for i in cuts), (".".join(parts[-i:]) for i in cuts)
        return not (self.skipped.isdisjoint(heads) and self.skipped.isdisjoint(tails))


def parse_quantization(raw: Mapping[str, Any], problems: list[str]) -> BlockQuantization | None:
    """Return the quantisation, None if config.json has none; complaints with the field go to `problems`."""
    found = raw.get(KEY)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        problems.append(f"{KEY} is {found!r}; expected a JSON object")
        return None
    for field, supported in SUPPORTED.items():
        value = found.get(field)
        if not any(value == good and type(value) is type(good) for good in supported):
            wanted = " or ".join(str(good) for good in supported if good is not None)
            problems.append(f"{KEY}.{field} is {value!r}; supported: {wanted}")
    for field, value in found.items():
        if field not in SUPPORTED and field != SKIPPED and value is not None:
            problems.append(f"{KEY}.{field} is {value!r}; unknown key that may change the weights")
    return BlockQuantization(_parse_skipped(found.get(SKIPPED), problems))


def _parse_skipped(value: Any, problems: list[str]) -> frozenset[str]:
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.append(f"{KEY}.{SKIPPED} is {value!r}; expected a list of module names")
        return frozenset()
    patterns = [name for name in names if not name.replace(".", "").replace("_", "").isalnum()]
    if patterns:
        problems.append(f"{KEY}.{SKIPPED} holds {patterns[0]!r}; supported: plain module names")
    return frozenset(names)
