"""Triton kernel for the first product of LoRA adapters of routed experts: h = A[slot, expert] x of each row.

A program has some rows of one expert, a share of the slots, one part or all parts, and one piece of the depth. It goes
through the slots of its share that its rows have. Few rows of an expert have about as many slots as rows, and a program
waits for the reads of each slot: so they get several programs. One captured launch serves every routing and every mix
of adapters.

N gathered rows, R permuted rows, K depth, S slots, e local experts, E experts with matrices, P parts, r rank,
Q = P * r, Z pieces of the depth.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.grouped_gemm import find_tile
from kernels.triton.lora_shrink import cuts_of, shrink

FEW_ROWS = (
    16  # of an expert on average: up to so many a program has as many, and the depth is split
)
BLOCK_M = 32  # rows of a program with more
SLOT_SHARES = 4  # programs for the slots of one tile of few rows
BLOCK_K = 128
SPLIT_DEPTH = 256  # least depth of a piece
NO_SLOT = tl.constexpr(1 << 30)


class RoutedRows(NamedTuple):
    """Where the permuted rows are, and where their adapters.

    slots_N    int64 or int32: slot of each gathered row, from 1 on, 0 for none; contiguous
    row_R      int32 or int64: gathered row of each permuted row; undefined for unused ones
    starts_e   int32 or int64: first permuted row of each expert
    ends_e     as starts_e: end of each expert's rows
    places_e   int32: index of each local expert among those with matrices
    """

    slots_N: torch.Tensor
    row_R: torch.Tensor
    starts_e: torch.Tensor
    ends_e: torch.Tensor
    places_e: torch.Tensor

    @property
    def few(self) -> bool:
        """Whether experts have few rows on average."""
        return len(self.row_R) <= FEW_ROWS * len(self.places_e)

    @property
    def block_rows(self) -> int:
        """Rows of a program."""
        return FEW_ROWS if self.few else BLOCK_M

    @property
    def most_tiles(self) -> int:
        """The largest number of tiles of an expert's rows, for any routing."""
        num_rows, rows = len(self.row_R), self.block_rows
        return (num_rows + min(num_rows, len(self.places_e)) * (rows - 1)) // rows

    @property
    def constants(self) -> dict[str, int]:
        """The constants that both kernels are compiled for."""
        num_experts = len(self.places_e)
        return {
            "EXPERTS": num_experts,
            "EXPERTS_2": triton.next_power_of_2(num_experts),
            "BLOCK_M": self.block_rows,
        }

    @property
    def slot_shares(self) -> int:
        """Programs for the slots of one tile."""
        return SLOT_SHARES if self.few else 1


@triton.jit
def rows_of_tile(
    slots_ptr,
    row_ptr,
    starts_ptr,
    ends_ptr,
    row_tile,
    share,
    EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Return the expert of a tile, its permuted and its gathered rows, and their slots, 0 for rows of other programs.

    Those are rows behind the expert's end, and rows with a slot of another share of SHARES. The expert is undefined
    where no row has a slot.
    """
    experts = tl.arange(0, EXPERTS_2)
    starts = tl.load(starts_ptr + experts, mask=experts < EXPERTS, other=0)
    ends = tl.load(ends_ptr + experts, mask=experts < EXPERTS, other=0)
    expert, start, end = find_tile(row_tile, starts, ends, BLOCK_M)
    permuted = start + tl.arange(0, BLOCK_M)
    gathered = tl.load(row_ptr + permuted, mask=permuted < end, other=0).to(tl.int64)
    slots = tl.load(slots_ptr + gathered, mask=permuted < end, other=0).to(tl.int32)
    slots = tl.where(slots % SHARES == share, slots, 0)
    return expert, permuted.to(tl.int64), gathered, slots


@triton.jit
def next_slot(slots, before):
    """Return the lowest slot of any row above `before`; NO_SLOT where no row has one."""
    return tl.min(tl.where(slots > before, slots, NO_SLOT), 0)


@triton.jit(do_not_specialize=["num_rows", "slots_ptr"])
def expert_lora_shrink_kernel(
    x_ptr,
    x_stride,
    a_ptr,
    a_stride,
    slots_ptr,
    row_ptr,
    starts_ptr,
    ends_ptr,
    places_ptr,
    h_ptr,
    num_rows,
    depth,
    piece,
    GATHERED: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply the rows of one tile by one part of the A of their slots, over one piece of the depth."""
    expert, permuted, gathered, slots = rows_of_tile(
        *(slots_ptr, row_ptr, starts_ptr, ends_ptr, tl.program_id(0), tl.program_id(2)),
        *(EXPERTS, EXPERTS_2, BLOCK_M, SHARES),
    )
    slot = next_slot(slots, 0)
    if slot < NO_SLOT:
        part, split = tl.program_id(1) % PARTS, tl.program_id(1) // PARTS
        ranks = tl.arange(0, BLOCK_R)
        in_rank = ranks < RANK
        width = PARTS * RANK
        rows = gathered if GATHERED else permuted
        x_at = x_ptr + rows[:, None] * x_stride
        place = tl.load(places_ptr + expert).to(tl.int64)
        a_at = a_ptr + (place * width + part * RANK + ranks)[None, :] * depth
        h_at = h_ptr + (split.to(tl.int64) * num_rows + permuted)[:, None] * width + part * RANK
        h_at += ranks[None, :]
        start, end = split * piece, min((split + 1) * piece, depth)
        while slot < NO_SLOT:
            here = slots == slot
            own_at = a_at + tl.cast(slot - 1, tl.int64) * a_stride
            shrink(x_at, own_at, h_at, here, in_rank, start, end, depth, BLOCK_M, BLOCK_R, BLOCK_K)
            slot = next_slot(slots, slot)


def expert_lora_shrink(
    x: torch.Tensor, a_SEQK: torch.Tensor, rows: RoutedRows, rank: int, *, gathered: bool
) -> torch.Tensor:
    """Return float32 [Z, R, Q], pieces of a sum; rows without an adapter are undefined.

    x          [N, K] where `gathered`, else [R, K]; rows may be strided
    a_SEQK     of the dtype of x, contiguous but for the stride of slots
    """
    num_rows, depth, width = len(rows.row_R), x.shape[1], a_SEQK.shape[2]
    assert x.stride(1) == 1 and a_SEQK[0].is_contiguous() and x.dtype == a_SEQK.dtype
    assert len(x) == (len(rows.slots_N) if gathered else num_rows), x.shape
    assert rows.slots_N.is_contiguous() and rows.row_R.is_contiguous()
    rank, splits, piece = cuts_of(
        width, rank, depth, least=SPLIT_DEPTH if rows.few else depth, block=BLOCK_K
    )
    parts = width // rank
    h_ZRQ = torch.empty(splits, num_rows, width, dtype=torch.float32, device=x.device)
    if num_rows:
        grid = rows.most_tiles, parts * splits, rows.slot_shares
        expert_lora_shrink_kernel[grid](
            *(x, x.stride(0), a_SEQK, a_SEQK.stride(0)),
            *(rows.slots_N, rows.row_R, rows.starts_e, rows.ends_e, rows.places_e),
            *(h_ZRQ, num_rows, depth, piece),
            GATHERED=gathered,
            RANK=rank,
            PARTS=parts,
            BLOCK_R=max(16, triton.next_power_of_2(rank)),
            SHARES=rows.slot_shares,
            BLOCK_K=BLOCK_K,
            num_warps=2 if rows.few else 4,
            **rows.constants,
        )
    return h_ZRQ
