"""Reads the folder of a LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

What the server cannot apply is refused by its name in the file. Knows nothing of slots and devices.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from workers.adapters.mapped_tensors import MappedTensors
from workers.adapters.peft_config import PeftConfig
from workers.lora_config import AdapterError
from workers.weights.files import FLOATS

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
MAX_NAMED = 8

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:([AB])(?:\.default)?\.weight|embedding_([AB])(?:\.default)?)"
)
# PEFT saves the embeddings of the base model beside adapters of them, which LoRA does not train.
_BASE = re.compile(r"(?:base_model\.model\.)?(.*(?:embed_tokens|lm_head))(?:\.base_layer)?\.weight")


@dataclass(frozen=True)
class LoraPair:
    """Two matrices, as the file has them; `a` and `b` are the names of the tensors.

    rank     rows of A and columns of B, those of all experts where the matrices are of several
    inputs   columns of A
    outputs  rows of B
    """

    a: str
    b: str
    rank: int
    inputs: int
    outputs: int

    def check_shape(self, name: str, outputs: int, inputs: int) -> None:
        """Raise AdapterError if the module of the model has other outputs or inputs."""
        if (self.inputs, self.outputs) != (inputs, outputs):
            raise AdapterError(
                f"{name}: the adapter has {self.inputs} inputs and {self.outputs} outputs, the model {inputs} and "
                f"{outputs}: it was made for another model"
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
    config: PeftConfig
    pairs: Mapping[str, LoraPair]
    bases: Mapping[str, tuple[int, ...]]
    digest: str
    tensors: MappedTensors

    @classmethod
    def read(cls, folder: Path) -> "PeftFolder":
        """Read the configuration and the header of the weights. Raises AdapterError."""
        config = PeftConfig.read(folder)
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
        pairs = _pairs(shapes, file)
        others = [
            f"{name} {it.dtype}" for name, it in tensors.stored.items() if it.dtype not in FLOATS
        ]
        if others:
            raise AdapterError(
                f"{file}: not supported: {named(others)}; expected {', '.join(FLOATS)}"
            )
        digest = hashlib.sha256(
            hashlib.sha256(config.content).digest() + tensors.digest
        ).hexdigest()
        return cls(folder, config, pairs, bases, digest, tensors)


def _pairs(shapes: Mapping[str, tuple[int, ...]], file: Path) -> dict[str, LoraPair]:
    names: dict[str, dict[str, str]] = {}
    others = []
    for name in shapes:
        match = _TENSOR.fullmatch(name)
        if match is not None and len(shapes[name]) == 2:
            found = names.setdefault(match[1], {})
            other = found.setdefault(match[2] or match[3], name)
            if other != name:
                raise AdapterError(f"{file}: {other} and {name} are one matrix of {match[1]}")
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
        pairs[module] = LoraPair(found["A"], found["B"], rank, inputs, outputs)
    return pairs


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
