"""One Triton kernel that copies KV blocks, or slots of states, of all layers to rows of bytes, or back.

A block lies in pieces of some KB in the cache of each layer. One launch for all pieces takes the place of two for each
layer, and a row of all pieces crosses the link to the host as one large copy. The launch also adds up the check value
of each row: its words are read once, and no further launches wait for their turn beside those of the model.

N rows, P bytes of a piece.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PROGRAM_WORDS = 1024  # of a piece, copied by one program
_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class PieceTable:
    """The pieces of a row, cut into parts of at most PROGRAM_WORDS words.

    parts   int64 [parts, 4]: address of the part of place 0, bytes from place to place, first word in the row, words
    dtype   of a word: the largest that no piece divides
    """

    parts: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, pieces: Sequence[torch.Tensor]) -> "PieceTable":
        """Return the table of pieces uint8 [places, P], each contiguous, in the order of a row. They must stay."""
        assert all(piece.is_contiguous() for piece in pieces), "pieces must be contiguous"
        word = math.gcd(8, *(n for it in pieces for n in (it.shape[1], it.data_ptr())))
        parts, first = [], 0
        for piece in pieces:
            size, address = piece.shape[1], piece.data_ptr()
            for start in range(0, size, PROGRAM_WORDS * word):
                num_bytes = min(PROGRAM_WORDS * word, size - start)
                parts.append((address + start, size, (first + start) // word, num_bytes // word))
            first += size
        table = torch.tensor(parts, dtype=torch.int64).to(pieces[0].device)
        return cls(table, _DTYPES[word])


@triton.jit
def _check(values, word, FACTOR: tl.constexpr):
    """Return int64: the share of words of a row in its check value, see workers.kv_transfer.contents.check_values.

    A word of 8 bytes is the sum of its smaller words, each shifted to its place; all sums are modulo 2^64.
    """
    NUM_BYTES: tl.constexpr = values.dtype.primitive_bitwidth // 8
    if NUM_BYTES == 8:
        wide, large = values, word
    else:
        unsigned = values
        if NUM_BYTES == 4:
            unsigned = values.to(tl.uint32, bitcast=True)
        elif NUM_BYTES == 2:
            unsigned = values.to(tl.uint16, bitcast=True)
        large = word * NUM_BYTES // 8
        wide = unsigned.to(tl.int64) << (word * NUM_BYTES % 8 * 8)
    return tl.sum(wide * ((large * FACTOR) | 1), axis=0)


@triton.jit(do_not_specialize=["row_words"])
def _copy_pieces(
    parts_ptr,
    places_ptr,
    rows_ptr,
    checks_ptr,
    row_words,
    TO_ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one part of one row, and add its share to the row's check value."""
    part_ptr, row = parts_ptr + tl.program_id(0) * 4, tl.program_id(1).to(tl.int64)
    address, stride = tl.load(part_ptr), tl.load(part_ptr + 1)
    first, num_words = tl.load(part_ptr + 2), tl.load(part_ptr + 3)
    word = tl.arange(0, BLOCK)
    inside = word < num_words
    piece_at = address + tl.load(places_ptr + row) * stride
    piece_ptr = piece_at.to(tl.pointer_type(rows_ptr.dtype.element_ty)) + word
    row_ptr = rows_ptr + row * row_words + first + word
    if TO_ROWS:
        values = tl.load(piece_ptr, mask=inside, other=0)
        tl.store(row_ptr, values, mask=inside)
    else:
        values = tl.load(row_ptr, mask=inside, other=0)
        tl.store(piece_ptr, values, mask=inside)
    tl.atomic_add(checks_ptr + row, _check(values, first + word, FACTOR), sem="relaxed")


def copy_pieces(
    table: PieceTable,
    places_N: torch.Tensor,
    rows_NB: torch.Tensor,
    checks_N: torch.Tensor,
    *,
    factor: int,
    to_rows: bool,
) -> None:
    """Copy the pieces of places int64 [N] to rows uint8 [N, B], or the rows to the places.

    Rows are contiguous, and B is a multiple of 8 bytes. Bytes of a row behind its last piece are neither read nor
    written. Added to checks_N, int64 [N], is the sum of each row's words of 8 bytes, word w times (w * factor) | 1,
    modulo 2^64.
    """
    num_rows = len(rows_NB)
    assert len(places_N) == num_rows and rows_NB.is_contiguous() and rows_NB.shape[1] % 8 == 0
    assert checks_N.dtype == torch.int64 and len(checks_N) == num_rows
    if num_rows:
        words = rows_NB.view(table.dtype)
        grid = len(table.parts), num_rows
        _copy_pieces[grid](
            table.parts,
            places_N,
            words,
            checks_N,
            words.shape[1],
            TO_ROWS=to_rows,
            FACTOR=factor,
            BLOCK=PROGRAM_WORDS,
        )
