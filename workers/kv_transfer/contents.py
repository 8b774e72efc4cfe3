"""The contents of KV blocks and of states as rows of bytes, and the digest of all that a row depends on.

A row of a block has the bytes of the block in every cache, in the order of the caches. A row of a state has the bytes
of a slot in every pool. A check value of a row finds damaged, torn and mixed-up bytes, wherever the row went meanwhile.
Knows nothing of names.

N rows, P bytes of a piece, W words of 8 bytes.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from kernels.interface.kv_layout import KVGroup
from kernels.linear_attention.base import LinearStates
from workers.kv_transfer.row_checks import CHECK_WORDS, ODD

ROW_ALIGN = 64  # bytes; a whole number of words, and of lines of a processor's cache
_FORMAT = 1  # of rows and check values; another one makes kept rows useless


class Rows:
    """The rows of one kind: of blocks, or of states.

    pieces     uint8 [places, P] each, views of the caches or pools
    row_bytes  of a row, a multiple of ROW_ALIGN; 0: there are no pieces
    """

    def __init__(self, pieces: Sequence[torch.Tensor]):
        self.pieces = list(pieces)
        sizes = [piece.shape[1] for piece in self.pieces]
        self._ends = list(accumulate(sizes))
        self.row_bytes = -(-(self._ends[-1] if sizes else 0) // ROW_ALIGN) * ROW_ALIGN
        self._kernel = _kernel_of(self.pieces)

    def pad_to(self, unit_bytes: int) -> None:
        """Make rows a whole number of units long."""
        self.row_bytes = -(-self.row_bytes // unit_bytes) * unit_bytes

    def pack(self, places: Sequence[int], rows_NB: torch.Tensor) -> torch.Tensor:
        """Copy the contents of `places` to the rows uint8 [N, row_bytes], on the caches' device and current stream.

        Bytes behind the last piece become zero. Return the check values of the rows, int64 [N].
        """
        places_N = self._on_device(places)
        if self._ends[-1] < self.row_bytes:
            rows_NB[:, self._ends[-1] :] = 0
        if self._kernel is not None:
            return self._kernel(places_N, rows_NB, to_rows=True)
        for piece, end in zip(self.pieces, self._ends, strict=True):
            part = rows_NB[:, end - piece.shape[1] : end]
            part.copy_(piece[places_N])
        return check_values(rows_NB)

    def unpack(self, rows_NB: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        """Copy rows, as `pack` has made them, to `places`, no two of which are equal; return their check values.

        On a GPU the bytes behind the last piece, which nothing reads, do not count.
        """
        places_N = self._on_device(places)
        if self._kernel is not None:
            return self._kernel(places_N, rows_NB, to_rows=False)
        for piece, end in zip(self.pieces, self._ends, strict=True):
            piece[places_N] = rows_NB[:, end - piece.shape[1] : end]
        return check_values(rows_NB)

    def warm_up(self) -> None:
        """Compile what copies rows, if anything does, while nothing runs: place 0 is copied to itself."""
        if self._kernel is not None:
            buffer_NB = torch.empty(
                1, self.row_bytes, dtype=torch.uint8, device=self.pieces[0].device
            )
            self.pack([0], buffer_NB)
            self.unpack(buffer_NB, [0]).cpu()

    def _on_device(self, places: Sequence[int]) -> torch.Tensor:
        places_N = torch.from_numpy(np.array(places, dtype=np.int64))
        if self._kernel is None:
            return places_N
        return places_N.pin_memory().to(self.pieces[0].device, non_blocking=True)


def _kernel_of(pieces: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor] | None:
    """Return the kernel that copies the pieces of a GPU and returns check values; None on CPU."""
    if not pieces or pieces[0].device.type != "cuda":
        return None
    return copy_on_device(pieces)


def copy_on_device(pieces: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function that copies places int64 [N] to rows, or back, and returns the rows' check values."""
    from kernels.triton.copy_pieces import PieceTable, copy_pieces

    table = PieceTable.of(pieces)

    def copy(places_N: torch.Tensor, rows_NB: torch.Tensor, *, to_rows: bool) -> torch.Tensor:
        checks_N = torch.full((len(rows_NB),), ODD, dtype=torch.int64, device=rows_NB.device)
        copy_pieces(table, places_N, rows_NB, checks_N, factor=ODD, to_rows=to_rows)
        return checks_N

    return copy


class CacheContents:
    """What a rank's device keeps of sequences.

    blocks, states   the rows of KV blocks, and of slots of states
    compatibility    digest of everything that a row depends on beside its name: contents of another digest are useless
    device           of the caches
    """

    def __init__(
        self, blocks: Rows, states: Rows, compatibility: bytes, device: torch.device
    ) -> None:
        self.blocks, self.states = blocks, states
        self.compatibility, self.device = compatibility, device

    def of(self, is_state: bool) -> Rows:
        """Return the rows of states, or of blocks."""
        return self.states if is_state else self.blocks


def block_pieces(
    groups: Iterable[KVGroup],
    caches: Sequence[torch.Tensor],
    num_blocks: int,
    block_size: int,
    value_bytes: int,
) -> list[torch.Tensor]:
    """Return the pieces of blocks in caches, one a layer; layers that share a cache have its pieces once."""
    pieces = []
    for group in groups:
        sizes = group.layout.piece_bytes(block_size, value_bytes)
        for layers in group.caches:
            flat, end = caches[layers[0]].view(-1).view(torch.uint8), 0
            for size in sizes:
                start, end = end, end + num_blocks * size
                pieces.append(flat[start:end].view(num_blocks, size))
    return pieces


def state_pieces(pools: Iterable[LinearStates]) -> list[torch.Tensor]:
    """Return the pieces of slots in pools of states."""
    return [
        tensor.view(len(tensor), -1).view(torch.uint8)
        for pool in pools
        for tensor in (pool.conv, pool.state)
    ]


def compatibility_of(facts: Mapping[str, object]) -> bytes:
    """Return the digest of `facts`, which JSON can hold, and of the format of rows."""
    text = json.dumps({**facts, "format": _FORMAT}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"phalanx kv").digest()


def check_values(rows_NB: torch.Tensor) -> torch.Tensor:
    """Return int64 [N], on the rows' device: a sum of each row's words, each with an odd factor of its place, mod 2^64.

    A change of one word always changes the sum, another accidental change does with all probability but 2^-64.
    Padding counts, unless it is zero, as `Rows.pack` leaves it.
    """
    words_NW = rows_NB.view(torch.int64)
    found_N = torch.full((len(words_NW),), ODD, dtype=torch.int64, device=rows_NB.device)
    for start in range(0, words_NW.shape[1], CHECK_WORDS):
        part_NW = words_NW[:, start : start + CHECK_WORDS]
        place_W = torch.arange(start, start + part_NW.shape[1], device=rows_NB.device)
        found_N += (part_NW * ((place_W * ODD) | 1)).sum(1)
    return found_N
