"""Reads adapter_config.json as PEFT saves it: rank and factor of each target, and no setting that changes the product.

A target is a module, or a parameter that holds all experts, as PEFT names it: `<module>.<parameter>`. What the server
cannot apply is refused by its key. Knows nothing of tensors, models and slots.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple

import torch

from workers.lora_config import AdapterError

CONFIG_FILE = "adapter_config.json"
DEFAULT = 8
"""PEFT's rank and alpha."""

# Keys of adapter_config.json with other values than these change what the adapter computes.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, [], ()),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
}
# Initialisations after which the base model is another one too.
_CHANGE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


class Declared(NamedTuple):
    """The matrices of a target, as the configuration has them.

    rank     of one expert where the target has several
    factor   on the product of the matrices
    """

    target: str
    rank: int
    factor: float

    def check(self, rows: int, max_rank: int, num_experts: int = 1) -> None:
        """Raise AdapterError if the rows of A are not this rank for each expert, or the rank is above the largest."""
        if rows != self.rank * num_experts:
            each = f" for each of the model's {num_experts} experts" if num_experts > 1 else ""
            raise AdapterError(
                f"{self.target}: lora_A has {rows} rows, {CONFIG_FILE} has rank {self.rank} (r, rank_pattern){each}: "
                f"the files are of two adapters{', or of another model' if each else ''}"
            )
        if self.rank > max_rank:
            raise AdapterError(
                f"{self.target}: rank {self.rank} is above lora.max_rank ({max_rank}); set lora.max_rank: {self.rank}"
            )


@dataclass(frozen=True)
class _ByPattern:
    """A value for each target: that of the first pattern which matches its name, or that of all."""

    of_all: Any
    patterns: tuple[tuple[re.Pattern[str], Any], ...]

    def of(self, target: str) -> Any:
        found = (value for pattern, value in self.patterns if pattern.match(target))
        return next(found, self.of_all)


@dataclass(frozen=True)
class PeftConfig:
    """A checked configuration of an adapter that can be applied; `content`: of its file."""

    content: bytes
    rslora: bool
    _ranks: _ByPattern
    _alphas: _ByPattern

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Read adapter_config.json of a folder. Raises AdapterError."""
        file = folder / CONFIG_FILE
        try:
            content = file.read_bytes()
            config = json.loads(content.decode())
        except FileNotFoundError:
            raise AdapterError(
                f"{folder} has no {CONFIG_FILE}: name a folder that PEFT saved"
            ) from None
        except (ValueError, OSError, RecursionError) as error:
            raise AdapterError(f"{file} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise AdapterError(f"{file} is {type(config).__name__}; expected an object")
        _check_supported(config, file)
        ranks = _by_pattern(config, "r", "rank_pattern", _is_rank, "a whole number above 0", file)
        alphas = _by_pattern(config, "lora_alpha", "alpha_pattern", _is_number, "a number", file)
        return cls(content, bool(config.get("use_rslora")), ranks, alphas)

    def declared(self, target: str) -> Declared:
        """Return rank and factor of a target, by its name in the model that PEFT had."""
        rank = self._ranks.of(target)
        divisor = math.sqrt(rank) if self.rslora else rank
        return Declared(target, rank, self._alphas.of(target) / divisor)


def _check_supported(config: Mapping[str, Any], file: Path) -> None:
    if config.get("peft_type") != "LORA":
        found = shortened(config.get("peft_type"))
        raise AdapterError(f"{file}: peft_type is {found}; only LORA is supported")
    refused = [
        f"{key} is {shortened(config[key])}"
        for key, plain in _PLAIN.items()
        if key in config and config[key] not in plain
    ]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_BASE):
        refused.append(f"init_lora_weights is {start!r}, which changes the base model too")
    if refused:
        raise AdapterError(f"{file}: not supported: {'; '.join(refused)}")


def _by_pattern(
    config: Mapping[str, Any],
    key: str,
    patterns_key: str,
    is_valid: Callable[[Any], bool],
    expected: str,
    file: Path,
) -> _ByPattern:
    """Return the values of `key` and of its patterns, in the order of the file."""
    patterns = config.get(patterns_key) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{file}: {patterns_key} is {shortened(patterns)}; expected an object")
    of_all = config.get(key, DEFAULT)
    for name, value in (
        (key, of_all),
        *((f"{patterns_key} {it!r}", patterns[it]) for it in patterns),
    ):
        if not is_valid(value):
            raise AdapterError(f"{file}: {name} is {shortened(value)}; expected {expected}")
    compiled = []
    for pattern, value in patterns.items():
        try:
            compiled.append((re.compile(rf"(.*\.)?({pattern})$"), value))
        except (re.error, OverflowError, RecursionError) as error:
            raise AdapterError(f"{file}: {patterns_key}: {pattern!r}: {error}") from error
    return _ByPattern(of_all, tuple(compiled))


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value > 0


def _is_number(value: Any) -> bool:
    limit = torch.finfo(torch.float32).max  # also of integers, which may be above every float
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -limit <= value <= limit
