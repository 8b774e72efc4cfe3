"""Fills a model straight from safetensors, reading only what this rank holds.

First every file's header is checked against the config, so that all that is wrong is named at once;
then tensors are copied one by one into the model's fused parameters. Knows nothing of what the
tensors mean, and keeps no page of a file mapped after it is done.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kernels.placement import ExpertPlacement
from workers.models.config import Qwen3MoeConfig
from workers.models.slots import Progress, SlottedModel
from workers.models.tensors import expected_tensors, rank_tensors, rank_weight_bytes

__all__ = ["CheckpointError", "expected_tensors", "load_weights", "rank_weight_bytes"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}
MAX_NAMED = 20
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class CheckpointError(ValueError):
    """A checkpoint whose tensors are not those of its config, or whose files cannot be read."""


@dataclass(frozen=True)
class _Stored:
    """A tensor's entry in the header of its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_weights(
    model: SlottedModel,
    path: str | Path,
    *,
    config: Qwen3MoeConfig,
    placement: ExpertPlacement,
    rank: int,
    progress: Progress | None = None,
) -> None:
    """Fill `model` from the checkpoint folder; `progress(done, total)` in bytes, after each tensor.

    CheckpointError names every missing, surplus or misshaped tensor, other ranks' included.
    """
    stored = _read_headers(Path(path))
    tied_head = stored.pop(TIED_HEAD, None) if config.tie_word_embeddings else None
    _check_against_config(Path(path), stored, expected_tensors(config))
    slots = model.weight_slots()
    assert slots.keys() == rank_tensors(config, placement, rank).keys()
    total = sum(_num_bytes(stored[name]) for name in slots)
    done = 0
    for file in sorted({stored[name].file for name in slots}):
        with _open(file) as tensors:
            for name, slot in slots.items():
                if stored[name].file == file:
                    slot.fill(tensors.get_tensor(name))
                    done += _num_bytes(stored[name])
                    if progress is not None:
                        progress(done, total)
    if tied_head is not None:
        _check_tied_head(tied_head, stored[EMBEDDING])


def _num_bytes(stored: _Stored) -> int:
    return math.prod(stored.shape) * FLOAT_BYTES[stored.dtype]


def _read_headers(folder: Path) -> dict[str, _Stored]:
    """Disk name -> header entry, over all files. Reads no tensor."""
    stored: dict[str, _Stored] = {}
    for file in _weight_files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if name in stored:
                    raise CheckpointError(
                        f"{folder}: {name} is in both {stored[name].file.name} and {file.name}"
                    )
                entry = tensors.get_slice(name)
                stored[name] = _Stored(file, tuple(entry.get_shape()), entry.get_dtype())
    return stored


def _weight_files(folder: Path) -> list[Path]:
    """One file, or those that the index names."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; convert other weight formats "
            "to safetensors first, or say model.weights: dummy for random ones"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index} cannot be read as a weight index: {error!r}") from error
    missing = sorted(name for name in names if not (folder / name).exists())
    if missing:
        raise CheckpointError(f"{index} names files that are not there: {_some(missing)}")
    return [folder / name for name in sorted(names)]


def _open(file: Path) -> Any:
    """The opened file, a context manager; its header has been read and its length checked."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors ({error}); is the download complete?"
        ) from error


def _check_against_config(
    folder: Path, stored: Mapping[str, _Stored], expected: Mapping[str, tuple[int, ...]]
) -> None:
    both = [name for name in expected if name in stored]
    complaints = {
        "missing": [name for name in expected if name not in stored],
        "surplus": [name for name in stored if name not in expected],
        "misshaped": [
            f"{name} {list(stored[name].shape)} instead of {list(expected[name])}"
            for name in both
            if stored[name].shape != expected[name]
        ],
        "not floating point": [
            f"{name} {stored[name].dtype}" for name in both if stored[name].dtype not in FLOAT_BYTES
        ],
    }
    found = [f"{len(names)} {kind}: {_some(names)}" for kind, names in complaints.items() if names]
    if found:
        raise CheckpointError(
            f"the tensors of {folder} are not those of its config.json: " + "; ".join(found)
        )


def _check_tied_head(head: _Stored, embedding: _Stored) -> None:
    """A tied checkpoint may repeat the embedding as lm_head, but not hold another one."""
    with _open(head.file) as head_file, _open(embedding.file) as embedding_file:
        if not torch.equal(head_file.get_tensor(TIED_HEAD), embedding_file.get_tensor(EMBEDDING)):
            raise CheckpointError(
                f"{TIED_HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true"
            )


def _some(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
