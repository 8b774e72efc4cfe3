"""The files of a checkpoint on this node, with digests by which nodes compare theirs. Needs no torch.

A digest covers the size, and for a large file samples: reading all bytes of a large checkpoint takes minutes.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workers.hub import DESCRIPTION, INDEX_FILE, MODULE_CONFIGS, SINGLE_FILE

SAMPLE_BYTES = 64 * 1024
NUM_SAMPLES = 64
ROOT = "model."  # of all names but heads; a checkpoint that was saved from the base model has names without it
MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library


class CheckpointError(ValueError):
    """The tensors of a checkpoint differ from its config, or its files cannot be read."""


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes, and the digest of the size and of samples."""

    size: int
    digest: str


@dataclass(frozen=True)
class CheckpointFiles:
    """The files that a rank reads, by name. `missing`: names without a file, () where the checkpoint is complete."""

    files: dict[str, FileFacts]
    missing: tuple[str, ...]

    @property
    def digest(self) -> str:
        """One digest of all files, of 16 hex digits."""
        text = json.dumps({name: facts.digest for name, facts in sorted(self.files.items())})
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_files(folder: Path, *, weights: bool) -> CheckpointFiles:
    """Look at a checkpoint's folder, which may not exist; weights: whether ranks read tensors from it."""
    names = {"config.json"}
    for pattern in DESCRIPTION:
        names.update(path.name for path in folder.glob(pattern))
    names.update(path.relative_to(folder).as_posix() for path in folder.glob(MODULE_CONFIGS))
    if weights:
        names.update(_weight_names(folder))
    found = {name: file_facts(folder / name) for name in names if (folder / name).is_file()}
    return CheckpointFiles(found, tuple(sorted(names - set(found))))


def file_facts(path: Path) -> FileFacts:
    """Return the facts of a file."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= SAMPLE_BYTES * NUM_SAMPLES:
            digest.update(file.read())
        else:
            for sample in range(NUM_SAMPLES):
                file.seek(sample * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return FileFacts(size, digest.hexdigest())


def has_scales(names: Iterable[str]) -> bool:
    """Return whether a tensor of these names is a scale of quantised weights."""
    return any("scale" in name.rpartition(".")[2] for name in names)


def has_one_file(folder: Path) -> bool:
    """Return whether SINGLE_FILE holds all tensors: it is there, and no index names it beside other files.

    Tools that add the head for multi-token prediction in a file of its own leave the one file under its name.
    """
    if not (folder / SINGLE_FILE).exists():
        return False
    try:
        return SINGLE_FILE not in _read_index(folder).values()
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return True


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor; raises what a missing or a broken index raises."""
    found: dict[str, str] = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))[
        "weight_map"
    ]
    return found


def _weight_names(folder: Path) -> list[str]:
    if has_one_file(folder):
        return [SINGLE_FILE]
    try:
        return sorted(set(_read_index(folder).values()))
    except FileNotFoundError:
        return [SINGLE_FILE]
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return [INDEX_FILE, SINGLE_FILE]  # the loader explains what is wrong with the index


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of a checkpoint's tensors, by the header of its one file or by its index.

    Return no names where neither can be read, which the loader reports.
    """
    try:
        if not has_one_file(folder):
            return frozenset(_read_index(folder))
        with (folder / SINGLE_FILE).open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            return frozenset(json.loads(content.read(min(length, MAX_HEADER_BYTES)))) - {
                "__metadata__"
            }
    except (ValueError, KeyError, TypeError, OSError):
        return frozenset()
