"""Reads the folder of a LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

What the server cannot apply is refused by its name in the file. Knows nothing of models, slots and devices.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from workers.adapters.mapped_tensors import MappedTensors
from workers.lora_config import AdapterError
from workers.weights.files import FLOATS

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
MAX_NAMED = 8
DEFAULT = 8
"""PEFT's rank and alpha."""

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:([AB])(?:\.default)?\.weight|embedding_([AB])(?:\.default)?)"
)
# PEFT saves the embeddings of the base model beside adapters of them, which LoRA does not train.
_BASE = re.compile(r"(?:base_model\.model\.)?(.*(?:embed_tokens|lm_head))(?:\.base_layer)?\.weight")
# Keys of adapter_config.json with other values than these change what the adapter computes.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, [], ()),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
}
# Initialisations after which the base model is another one too.
_CHANGE_BASE = ("pissa", "olora", "corda")


@dataclass(frozen=True)
class LoraPair:
    """The two matrices of one module, as the file has them; `a` and `b` are the names of the tensors.

    rank     rows of A and columns of B
    inputs   columns of A
    outputs  rows of B
    alpha, rslora   of the factor on the product
    declared rank by the configuration, of one expert where the module has several
    """

    a: str
    b: str
    rank: int
    inputs: int
    outputs: int
    alpha: float
    rslora: bool
    declared: int

    def scale(self, rank: int) -> float:
        """Return the factor on the product of matrices of this rank."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def check_declared(self, name: str) -> None:
        """Raise AdapterError if the matrices of a module have another rank than the configuration, as PEFT does."""
        if self.rank != self.declared:
            raise AdapterError(
                f"{name}: its matrices have rank {self.rank}, {CONFIG_FILE} has {self.declared} (r, rank_pattern): the "
                "files are of two adapters"
            )


@dataclass(frozen=True)
class PeftFolder:
    """A checked folder.

    pairs    by name of the module in the model, without PEFT's prefix
    bases    shapes of embeddings of the base model that the file holds too, by module
    digest   of both files
    tensors  of the file
    """

    folder: Path
    pairs: Mapping[str, LoraPair]
    bases: Mapping[str, tuple[int, ...]]
    digest: str
    tensors: MappedTensors

    @classmethod
    def read(cls, folder: Path) -> "PeftFolder":
        """Read the configuration and the header of the weights. Raises AdapterError."""
        config, content = _config(folder)
        file = folder / WEIGHTS_FILE
        if not file.is_file():
            hint = ""
            if (folder / PICKLED_FILE).exists():
                hint = f"; {PICKLED_FILE} is no safetensors file: save the adapter anew with PEFT"
            raise AdapterError(f"{folder} has no {WEIGHTS_FILE}{hint}")
        try:
            tensors = MappedTensors(file)
        except (SafetensorError, OSError) as error:
            raise AdapterError(
                f"{file} cannot be read as safetensors ({error}); is the copy complete?"
            ) from error
        shapes = {name: stored.shape for name, stored in tensors.stored.items()}
        bases = {
            match[1]: shape for name, shape in shapes.items() if (match := _BASE.fullmatch(name))
        }
        pairs = _pairs(config, shapes, file)
        others = [
            f"{name} {it.dtype}" for name, it in tensors.stored.items() if it.dtype not in FLOATS
        ]
        if others:
            raise AdapterError(
                f"{file}: not supported: {named(others)}; expected {', '.join(FLOATS)}"
            )
        digest = hashlib.sha256(hashlib.sha256(content).digest() + tensors.digest).hexdigest()
        return cls(folder, pairs, bases, digest, tensors)


def _config(folder: Path) -> tuple[Mapping[str, Any], bytes]:
    """Return adapter_config.json of an adapter that can be applied, and its bytes."""
    file = folder / CONFIG_FILE
    try:
        content = file.read_bytes()
        config = json.loads(content.decode())
    except FileNotFoundError:
        raise AdapterError(
            f"{folder} has no {CONFIG_FILE}: name a folder that PEFT saved"
        ) from None
    except (ValueError, OSError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} is {type(config).__name__}; expected an object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(
            f"{file}: peft_type is {config.get('peft_type')!r}; only LORA is supported"
        )
    refused = [
        f"{key} is {config[key]!r}"
        for key, plain in _PLAIN.items()
        if key in config and config[key] not in plain
    ]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_BASE):
        refused.append(f"init_lora_weights is {start!r}, which changes the base model too")
    if refused:
        raise AdapterError(f"{file}: not supported: {'; '.join(refused)}")
    return config, content


def _pairs(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], file: Path
) -> dict[str, LoraPair]:
    names: dict[str, dict[str, str]] = {}
    others = []
    for name in shapes:
        match = _TENSOR.fullmatch(name)
        if match is not None and len(shapes[name]) == 2:
            names.setdefault(match[1], {})[match[2] or match[3]] = name
        elif not _BASE.fullmatch(name):
            others.append(name)
    if others:
        raise AdapterError(f"{file}: not supported: {named(others)}")
    if not names:
        raise AdapterError(f"{file} holds no tensors lora_A and lora_B")
    alone = [module for module, found in names.items() if len(found) != 2]
    if alone:
        raise AdapterError(f"{file}: one of lora_A and lora_B is missing of {named(alone)}")
    pairs = {}
    for module, found in names.items():
        (rank, inputs), (outputs, columns) = shapes[found["A"]], shapes[found["B"]]
        if rank != columns or not rank:
            raise AdapterError(
                f"{file}: lora_A of {module} has {rank} rows and lora_B {columns} columns; expected "
                "equal numbers"
            )
        alpha, rslora = _alpha(config, module, file), bool(config.get("use_rslora"))
        declared = _of_module(config, "r", "rank_pattern", module, file)
        if isinstance(declared, bool) or not isinstance(declared, int) or declared < 1:
            raise AdapterError(f"{file}: r is {declared!r}; expected a whole number above 0")
        pairs[module] = LoraPair(
            found["A"], found["B"], rank, inputs, outputs, alpha, rslora, declared
        )
    return pairs


def _of_module(
    config: Mapping[str, Any], key: str, patterns_key: str, module: str, file: Path
) -> Any:
    """Return the value of `key` for a module: that of the first pattern which matches its name, or that of all."""
    for pattern, value in (config.get(patterns_key) or {}).items():
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise AdapterError(f"{file}: {patterns_key}: {pattern!r}: {error}") from error
        if matches:
            return value
    return config.get(key, DEFAULT)


def _alpha(config: Mapping[str, Any], module: str, file: Path) -> float:
    alpha = _of_module(config, "lora_alpha", "alpha_pattern", module, file)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"{file}: lora_alpha is {alpha!r}; expected a number")
    return float(alpha)


def named(names: list[str]) -> str:
    """Return the first names, and how many follow."""
    first = ", ".join(sorted(names)[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{first} and {more} more" if more > 0 else first


def check_finite(stacked: torch.Tensor, names: Sequence[str], file: Path) -> None:
    """Raise AdapterError for values that are NaN or infinite, which would reach every token of the adapter.

    stacked   a tensor of the file for each of `names`
    """
    if _is_finite(stacked):
        return
    wrong = [name for name, tensor in zip(names, stacked, strict=True) if not _is_finite(tensor)]
    raise AdapterError(f"{file}: {named(wrong)} holds NaN or infinite values")


def _is_finite(tensor: torch.Tensor) -> bool:
    # NaN and infinite values are extremes; torch.isfinite would write several tensors of this size.
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))
