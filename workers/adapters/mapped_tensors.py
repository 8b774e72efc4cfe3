"""The tensors of one safetensors file, mapped into memory, and memory to stack them in. Knows nothing of adapters."""

import hashlib
import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch

from workers.weights.files import DTYPES, StoredTensor, read_header

PIECE = 64 * 2**20  # bytes of one digest
HASHERS = 4  # threads of one file


class MappedTensors:
    """The tensors of a file, which stays open. The constructor raises SafetensorError and OSError.

    stored   the entries of the file's header, by name
    """

    def __init__(self, file: Path):
        self.stored: Mapping[str, StoredTensor] = read_header(file)
        with file.open("rb") as content:
            # torch takes writable memory alone; what is written would stay in this process
            self._content = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_COPY)

    @cached_property
    def digest(self) -> bytes:
        """The digest of the digests of the file's pieces, which several threads compute."""
        whole = memoryview(self._content)
        pieces = [whole[start : start + PIECE] for start in range(0, len(whole), PIECE)]
        with ThreadPoolExecutor(HASHERS, "digests") as pool:
            digests = pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces)
            return hashlib.sha256(b"".join(digests)).digest()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor without a copy."""
        return self._values(name).view(self.stored[name].shape)

    def stack(self, names: Sequence[str], scratch: "Scratch") -> torch.Tensor:
        """Return tensors of one shape and dtype in the order of their names, in the memory of `scratch`."""
        first = self.stored[names[0]]
        out = scratch.take((len(names), *first.shape), DTYPES[first.dtype])
        torch.stack([self._values(name) for name in names], out=out.view(len(names), -1))
        return out

    def _values(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        dtype = DTYPES[stored.dtype]
        count = stored.num_bytes // dtype.itemsize
        return torch.frombuffer(self._content, dtype=dtype, count=count, offset=stored.offset)


class Scratch:
    """Host memory that is used again: the first touch of new pages takes longer than a copy of them."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an undefined tensor; it shares its memory with all tensors that were returned before."""
        count = torch.Size(shape).numel()
        if len(self._bytes) < count * dtype.itemsize:
            self._bytes = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        return self._bytes[: count * dtype.itemsize].view(dtype).view(*shape)
