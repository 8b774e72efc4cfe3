"""Reads the headers of a checkpoint's safetensors files and compares them with the weight map.

All complaints are raised at once, before any tensor is read. Knows nothing of ranks or of models.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from workers.hub import INDEX_FILE, SINGLE_FILE
from workers.specs.four_bit import DiskKind, DiskTensor
from workers.specs.weight_map import WeightEntry
from workers.weights.checkpoint_files import CheckpointError, has_one_file

FLOATS = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
SCALES = {**FLOATS, "F8_E8M0": torch.float8_e8m0fnu}
DTYPES: dict[str, torch.dtype] = {
    **SCALES,
    DiskKind.FP8: torch.float8_e4m3fn,
    DiskKind.BYTES: torch.uint8,
    DiskKind.WORDS: torch.int32,
    DiskKind.INTEGERS: torch.int64,
}
_FLOATING: dict[DiskKind, Collection[str]] = {DiskKind.FLOAT: FLOATS, DiskKind.SCALE: SCALES}
MAX_NAMED = 20
TIED_HEAD = (
    "lm_head.weight"  # not in the weight map of a tied checkpoint, which may hold it none the less
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's entry in the header of its file; `offset` is its first byte in the file.

    columns   the file holds the transpose of a wider matrix [N, K] here, of which rows from the first to the end are
              meant; num_bytes counts the whole matrix
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int
    columns: tuple[int, int] | None = None

    def part(self, index: int) -> "StoredTensor":
        """Return the part of this index of the first axis."""
        num_bytes = self.num_bytes // self.shape[0]
        at = self.offset + index * num_bytes
        return StoredTensor(self.file, self.shape[1:], self.dtype, at, num_bytes)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return the header entry of each tensor of all files, by name. Reads no tensor."""
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        try:
            entries = read_header(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} cannot be read as safetensors ({error}); is the download complete?"
            ) from error
        for name, entry in entries.items():
            if name in stored:
                raise CheckpointError(
                    f"{folder}: {name} is in both {stored[name].file.name} and {file.name}"
                )
            stored[name] = entry
    return stored


def _weight_files(folder: Path) -> list[Path]:
    """Return the one file, or the files that the index names."""
    if has_one_file(folder):
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; convert other weight formats "
            "to safetensors first, or set model.weights: dummy for random ones"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index} cannot be read as a weight index: {error!r}") from error
    missing = sorted(name for name in names if not (folder / name).exists())
    if missing:
        raise CheckpointError(f"{index} names files that are not there: {_some(missing)}")
    return [folder / name for name in sorted(names)]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return a file's entries. Raises SafetensorError and OSError.

    The library checks header and length, but does not return the offsets of tensors.
    """
    with safe_open(file, framework="pt"):
        pass
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        where = (8 + length + begin, end - begin)
        entries[name] = StoredTensor(file, tuple(entry["shape"]), entry["dtype"], *where)
    return entries


def check_against_map(
    folder: Path, stored: Mapping[str, StoredTensor], entries: Iterable[WeightEntry]
) -> None:
    """Raise CheckpointError with every missing, surplus or misshaped tensor, and every tensor of a wrong dtype."""
    expected: dict[str, DiskTensor] = {}
    unread: set[str] = set()
    for entry in entries:
        expected |= entry.disk
        unread.update(entry.unread)
    both = [name for name in expected if name in stored]
    complaints = {
        "missing": [name for name in expected if name not in stored],
        "surplus": [name for name in stored if name not in expected and name not in unread],
        "misshaped": [
            f"{name} {list(stored[name].shape)} instead of {list(expected[name].shapes[0])}"
            for name in both
            if stored[name].shape not in expected[name].shapes
        ],
    }
    for kind in DiskKind:
        suffix = "" if kind in _FLOATING else ", as in quantization_config"
        complaints[f"not {kind}{suffix}"] = [
            f"{name} {stored[name].dtype}"
            for name in both
            if expected[name].kind == kind and stored[name].dtype not in _dtypes(kind)
        ]
    found = [f"{len(names)} {kind}: {_some(names)}" for kind, names in complaints.items() if names]
    if found:
        raise CheckpointError(
            f"the tensors of {folder} are not those of its config.json: " + "; ".join(found)
        )


def _dtypes(kind: DiskKind) -> Collection[str]:
    """Return the dtypes of safetensors that a tensor of this kind may have."""
    return _FLOATING.get(kind, (kind,))


def check_tied_head(head: StoredTensor, embedding: StoredTensor, embedding_name: str) -> None:
    """Raise CheckpointError if a tied checkpoint has a head that differs from its embedding; it may repeat it."""
    with (
        safe_open(head.file, framework="pt") as head_file,
        safe_open(embedding.file, framework="pt") as embedding_file,
    ):
        if not torch.equal(
            head_file.get_tensor(TIED_HEAD), embedding_file.get_tensor(embedding_name)
        ):
            raise CheckpointError(
                f"{TIED_HEAD} differs from {embedding_name}, but tie_word_embeddings is true"
            )


def _some(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
