"""Triton kernel for the first product of LoRA adapters: h = A[slot] x of each row with an adapter.

A program has some rows, one slot, and one part or all parts, and ends at once unless one of its rows has the slot: rows
need no order, and slots that no row has cost next to nothing. So one captured launch serves every mix of adapters. Few
rows share the depth of a product between programs, because reading A bounds them.

T rows, K depth, S slots, P parts, r rank, Q = P * r, Z pieces of the depth.
"""

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_K = 32, 64
SPLIT_ROWS = 256  # up to so many rows the depth is split
SPLIT_DEPTH = 512  # least depth of a piece
MAX_SPLITS = 8
MOST_AT_ONCE = (
    64  # ranks of all parts up to which a program takes all parts, and reads its rows once
)


@triton.jit
def shrink(
    x_at,
    a_at,
    h_at,
    here,
    in_rank,
    start,
    end,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply the rows `here` by one part of one A, from `start` to `end` of the depth."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for first in range(start, end, BLOCK_K):
        columns = first + k
        inside = columns < depth
        x = tl.load(x_at + columns[None, :], mask=here[:, None] & inside[None, :], other=0)
        a = tl.load(a_at + columns[:, None], mask=in_rank[None, :] & inside[:, None], other=0)
        total = tl.dot(x, a, total, input_precision="ieee")
    tl.store(h_at, total, mask=here[:, None] & in_rank[None, :])


@triton.jit(do_not_specialize=["num_rows", "slots_ptr"])
def lora_shrink_kernel(
    x_ptr,
    x_stride,
    a_ptr,
    a_stride,
    slots_ptr,
    h_ptr,
    num_rows,
    depth,
    piece,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply rows of x that have the program's slot by one part of its A, over one piece of the depth."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.program_id(1)
    part, split = tl.program_id(2) % PARTS, tl.program_id(2) // PARTS
    mine = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0) == slot + 1
    if tl.sum(mine.to(tl.int32), 0) > 0:
        ranks = tl.arange(0, BLOCK_R)
        in_rank = ranks < RANK
        width = PARTS * RANK
        x_at = x_ptr + rows[:, None].to(tl.int64) * x_stride
        a_at = a_ptr + slot.to(tl.int64) * a_stride + (part * RANK + ranks)[None, :] * depth
        h_at = h_ptr + (split * num_rows + rows).to(tl.int64)[:, None] * width + part * RANK
        h_at += ranks[None, :]
        start, end = split * piece, min((split + 1) * piece, depth)
        shrink(x_at, a_at, h_at, mine, in_rank, start, end, depth, BLOCK_M, BLOCK_R, BLOCK_K)


def cuts_of(width: int, rank: int, depth: int, *, least: int, block: int) -> tuple[int, int, int]:
    """Return the values of h that a program makes of a row, the pieces of the depth, and the depth of a piece.

    width, rank   of all parts and of one
    least         depth of a piece
    block         of which the depth of a piece is a multiple
    """
    splits = min(MAX_SPLITS, max(1, depth // least))
    piece = triton.cdiv(triton.cdiv(depth, splits), block) * block
    return width if width <= MOST_AT_ONCE else rank, splits, piece


def lora_shrink(
    x_TK: torch.Tensor,
    a_SQK: torch.Tensor,
    slots_T: torch.Tensor,
    rank: int,
) -> torch.Tensor:
    """Return float32 [Z, T, Q], pieces of a sum; rows without an adapter are undefined.

    x_TK       rows may be strided
    a_SQK      of the dtype of x, contiguous but for the stride of slots
    slots_T    int64, slots from 1 on, 0 for none
    """
    num_rows, depth = x_TK.shape
    num_slots, width, _ = a_SQK.shape
    assert x_TK.stride(1) == 1 and a_SQK[0].is_contiguous() and x_TK.dtype == a_SQK.dtype
    least = SPLIT_DEPTH if num_rows <= SPLIT_ROWS else depth
    rank, splits, piece = cuts_of(width, rank, depth, least=least, block=BLOCK_K)
    parts = width // rank
    h_ZTQ = torch.empty(splits, num_rows, width, dtype=torch.float32, device=x_TK.device)
    if num_rows:
        grid = triton.cdiv(num_rows, BLOCK_M), num_slots, parts * splits
        lora_shrink_kernel[grid](
            x_TK,
            x_TK.stride(0),
            a_SQK,
            a_SQK.stride(0),
            slots_T,
            h_ZTQ,
            num_rows,
            depth,
            piece,
            RANK=rank,
            PARTS=parts,
            BLOCK_M=BLOCK_M,
            BLOCK_R=max(16, triton.next_power_of_2(rank)),
            BLOCK_K=BLOCK_K,
        )
    return h_ZTQ
