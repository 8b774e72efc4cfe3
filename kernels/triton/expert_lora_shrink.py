"""Triton kernel for the first product of LoRA adapters of routed experts: h = A[slot, expert] x of each row.

A program has some rows of one expert, a share of the slots, one part or all parts, and one piece of the depth. It goes
through the slots of its share that its rows have. Few rows of an expert have about as many slots as rows, and a program
waits for the reads of each slot: so they get several programs. One captured launch serves every routing and every mix
of adapters.

N gathered rows, R permuted rows, K depth, S slots, e local experts, E experts with matrices, P parts, r rank,
Q = P * r, Z pieces of the depth.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.expert_lora_tiles import ExpertTiles
from kernels.triton.lora_shrink import cuts_of, shrink

SLOT_SHARES = 4  # programs for the slots of one tile of few rows
SPLIT_DEPTH = 256  # least depth of a piece
MOST_DEPTH = 128  # of a tile
NO_SLOT = tl.constexpr(1 << 30)


@triton.jit
def rows_of_tile(bounds_ptr, slots_ptr, tile, BLOCK_M: tl.constexpr):
    """Return the expert of a tile, its permuted rows, and their slots, 0 behind the expert's end.

    The expert is undefined where no row has a slot.
    """
    bounds_at = bounds_ptr + tile * 3
    expert, start, end = tl.load(bounds_at), tl.load(bounds_at + 1), tl.load(bounds_at + 2)
    permuted = start + tl.arange(0, BLOCK_M)
    slots = tl.load(slots_ptr + permuted, mask=permuted < end, other=0)
    return expert, permuted.to(tl.int64), slots


@triton.jit
def next_slot(slots, before):
    """Return the lowest slot of any row above `before`; NO_SLOT where no row has one."""
    return tl.min(tl.where(slots > before, slots, NO_SLOT), 0)


@triton.jit(do_not_specialize=["num_rows"])
def expert_lora_shrink_kernel(
    x_ptr,
    x_stride,
    a_ptr,
    a_stride,
    bounds_ptr,
    slots_ptr,
    row_ptr,
    places_ptr,
    h_ptr,
    num_rows,
    depth,
    piece,
    GATHERED: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply the rows of one tile by one part of the A of their slots, over one piece of the depth."""
    expert, rows, slots = rows_of_tile(bounds_ptr, slots_ptr, tl.program_id(0), BLOCK_M)
    slots = tl.where(slots % SHARES == tl.program_id(2), slots, 0)  # of this program's share
    slot = next_slot(slots, 0)
    if slot < NO_SLOT:
        part, split = tl.program_id(1) % PARTS, tl.program_id(1) // PARTS
        ranks = tl.arange(0, BLOCK_R)
        in_rank = ranks < RANK
        width = PARTS * RANK
        h_at = h_ptr + (split.to(tl.int64) * num_rows + rows)[:, None] * width + part * RANK
        h_at += ranks[None, :]
        if GATHERED:
            rows = tl.load(row_ptr + rows, mask=slots > 0, other=0).to(tl.int64)
        x_at = x_ptr + rows[:, None] * x_stride
        place = tl.load(places_ptr + expert).to(tl.int64)
        a_at = a_ptr + (place * width + part * RANK + ranks)[None, :] * depth
        start, end = split * piece, min((split + 1) * piece, depth)
        while slot < NO_SLOT:
            here = slots == slot
            own_at = a_at + tl.cast(slot - 1, tl.int64) * a_stride
            shrink(x_at, own_at, h_at, here, in_rank, start, end, depth, BLOCK_M, BLOCK_R, BLOCK_K)
            slot = next_slot(slots, slot)


def block_depth(block_ranks: int, dtype: torch.dtype) -> int:
    """Return the depth of a tile of x and A of so many ranks: 32, 64 or 128.

    It is the largest with which a program of Hopper keeps its tiles in registers, up to ranks of 512 bytes.
    """
    return max(32, min(MOST_DEPTH, 2**14 // (block_ranks * dtype.itemsize)))


def expert_lora_shrink(
    x: torch.Tensor,
    a_SEQK: torch.Tensor,
    tiles: ExpertTiles,
    places_e: torch.Tensor,
    rank: int,
    *,
    gathered: bool,
) -> torch.Tensor:
    """Return float32 [Z, R, Q], pieces of a sum; rows without an adapter are undefined.

    x          [N, K] where `gathered`, else [R, K]; rows may be strided
    a_SEQK     of the dtype of x, contiguous but for the stride of slots
    places_e   int32: index of each local expert among those with matrices
    """
    num_rows, depth, width = len(tiles.row_R), x.shape[1], a_SEQK.shape[2]
    assert x.stride(1) == 1 and a_SEQK[0].is_contiguous() and x.dtype == a_SEQK.dtype
    assert len(x) == (tiles.num_gathered if gathered else num_rows), x.shape
    least = SPLIT_DEPTH if tiles.few else depth
    rank, splits, piece = cuts_of(width, rank, depth, least=least, block=MOST_DEPTH)
    parts, block_ranks = width // rank, max(16, triton.next_power_of_2(rank))
    h_ZRQ = torch.empty(splits, num_rows, width, dtype=torch.float32, device=x.device)
    if num_rows:
        shares = SLOT_SHARES if tiles.few else 1
        expert_lora_shrink_kernel[len(tiles.bounds_t3), parts * splits, shares](
            *(x, x.stride(0), a_SEQK, a_SEQK.stride(0)),
            *(tiles.bounds_t3, tiles.slots_R, tiles.row_R, places_e),
            *(h_ZRQ, num_rows, depth, piece),
            GATHERED=gathered,
            RANK=rank,
            PARTS=parts,
            BLOCK_M=tiles.block_rows,
            SHARES=shares,
            BLOCK_R=block_ranks,
            BLOCK_K=block_depth(block_ranks, x.dtype),
            num_warps=2 if tiles.few else 4,
        )
    return h_ZRQ
