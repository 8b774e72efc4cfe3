"""Triton kernel that lists the tiles of routed rows, and the slot of each row, for the products of LoRA adapters.

The four products of a layer's experts have the same tiles. A program of a product that finds its tile among the bounds
of all experts, and its slots by way of the gathered rows, waits for as many reads as all its other work takes.

N gathered rows, R permuted rows, e local experts, t tiles.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.grouped_gemm import find_tile

FEW_ROWS = 16  # of an expert on average: up to so many a tile has as many rows
BLOCK_M = 32  # rows of a tile with more


class ExpertTiles(NamedTuple):
    """Permuted rows of the experts, in tiles of one expert each.

    bounds_t3    int32: local expert, first permuted row, and end of its rows, which may lie behind the tile's end or,
                 for a tile that is not needed, before its first row
    slots_R      int32: slot of each permuted row, from 1 on, 0 for none; undefined for unused rows
    row_R        int32 or int64: gathered row of each permuted row; undefined for unused rows
    num_gathered   N
    block_rows   rows of a tile
    """

    bounds_t3: torch.Tensor
    slots_R: torch.Tensor
    row_R: torch.Tensor
    num_gathered: int
    block_rows: int

    @property
    def few(self) -> bool:
        """Whether experts have few rows on average."""
        return self.block_rows == FEW_ROWS


@triton.jit(do_not_specialize=["slots_ptr"])
def expert_lora_tiles_kernel(
    slots_ptr,
    row_ptr,
    starts_ptr,
    ends_ptr,
    bounds_ptr,
    slots_R_ptr,
    EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write the bounds of one tile, and the slots of its rows."""
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_2)
    starts = tl.load(starts_ptr + experts, mask=experts < EXPERTS, other=0)
    ends = tl.load(ends_ptr + experts, mask=experts < EXPERTS, other=0)
    expert, start, end = find_tile(tile, starts, ends, BLOCK_M)
    permuted = start + tl.arange(0, BLOCK_M)
    used = permuted < end
    gathered = tl.load(row_ptr + permuted, mask=used, other=0).to(tl.int64)
    slots = tl.load(slots_ptr + gathered, mask=used, other=0)
    tl.store(slots_R_ptr + permuted, slots.to(tl.int32), mask=used)
    bounds_at = bounds_ptr + tile * 3
    tl.store(bounds_at, expert.to(tl.int32))
    tl.store(bounds_at + 1, start.to(tl.int32))
    tl.store(bounds_at + 2, end.to(tl.int32))


def expert_lora_tiles(
    slots_N: torch.Tensor, row_R: torch.Tensor, starts_e: torch.Tensor, ends_e: torch.Tensor
) -> ExpertTiles:
    """Return the tiles of rows of which the adapters have these slots.

    slots_N    int64 or int32: slot of each gathered row, 0 for none; contiguous
    row_R      int32 or int64: gathered row of each permuted row; undefined for unused ones; contiguous
    starts_e   int32 or int64: first permuted row of each expert
    ends_e     as starts_e: end of each expert's rows
    """
    assert slots_N.is_contiguous() and row_R.is_contiguous()
    num_rows, num_experts = len(row_R), len(starts_e)
    block = FEW_ROWS if num_rows <= FEW_ROWS * num_experts else BLOCK_M
    new: dict[str, Any] = {"dtype": torch.int32, "device": row_R.device}
    bounds_t3 = torch.empty(most_tiles(num_rows, num_experts, block), 3, **new)
    slots_R = torch.empty(num_rows, **new)
    if num_rows:
        expert_lora_tiles_kernel[(len(bounds_t3),)](
            *(slots_N, row_R, starts_e, ends_e, bounds_t3, slots_R),
            EXPERTS=num_experts,
            EXPERTS_2=triton.next_power_of_2(num_experts),
            BLOCK_M=block,
            num_warps=1,
        )
    return ExpertTiles(bounds_t3, slots_R, row_R, len(slots_N), block)


def most_tiles(num_rows: int, num_experts: int, block_rows: int) -> int:
    """Return the largest number of tiles of `num_rows` permuted rows, for any routing."""
    return (num_rows + min(num_rows, num_experts) * (block_rows - 1)) // block_rows
