"""Tiles of kernels.triton.grouped_gemm_four_bit, and which of them a product takes by its rows. Launches nothing."""

from dataclasses import dataclass

import torch
import triton

from kernels.four_bit import BLOCK
from kernels.triton.split_depth import MOST_PARTS


@dataclass(frozen=True)
class FourBitTile:
    """A tile of `rows` permuted rows by `columns` outputs, a multiple of 64.

    programs_per_sm   programs that fit on an SM at once
    unroll            blocks of 64 input columns in a stage of the loop
    early             programs start before the kernel before has ended (kernels.triton.pdl)
    splits            most programs that share the depth of a tile (kernels.triton.split_depth)
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    unroll: int = 1
    early: bool = False
    splits: int = 1

    def most_tiles(self, num_permuted: int, num_experts: int, width: int) -> int:
        """Return the largest number of tiles for any distribution of rows to experts."""
        row_tiles = min(num_permuted, num_permuted // self.rows + num_experts)
        return row_tiles * triton.cdiv(width, self.columns)

    def parts(self, tiles: int, depth: int, num_sms: int) -> int:
        """Return how many programs share the depth of each of `tiles` tiles, so that all run at once."""
        rounds = triton.cdiv(depth // BLOCK, self.unroll)
        beside = num_sms * self.programs_per_sm // max(1, tiles)
        return max(1, min(self.splits, MOST_PARTS.value, beside, rounds // LEAST_ROUNDS))


# Mean rows of an expert up to which most experts have none: tiles are fewer than SMs, and each reads further ahead.
FEW_ROWS = 0.25
# Rounds of the loop in a part of the depth: with fewer, the sums of the parts cost more than the loop.
LEAST_ROUNDS = 2
# For other dtypes, in which the kernel serves comparisons alone.
SLOW = FourBitTile(16, BLOCK, 4, 2, 1)


def up_tile(mean: float, dtype: torch.dtype, width: int) -> FourBitTile:
    """Return the tile of a gated product with this mean number of rows of an expert and this many outputs.

    The fastest of those in docs/results/gpu-four-bit.json.
    """
    if dtype == torch.bfloat16 and mean <= FEW_ROWS:
        return FourBitTile(16, 64, 4, 4, 4, unroll=2, early=True, splits=MOST_PARTS.value)
    return _tile(mean, dtype, width, num_stages=3)


def down_tile(mean: float, dtype: torch.dtype, width: int) -> FourBitTile:
    """Return the tile of a product that is not gated, see `up_tile`."""
    columns = min(128, width)
    if dtype == torch.bfloat16 and mean <= FEW_ROWS:
        return FourBitTile(16, columns, 4, 5, 3, early=True, splits=MOST_PARTS.value)
    return _tile(mean, dtype, width, num_stages=4)


def dense_tile(num_rows: int, dtype: torch.dtype, width: int, num_sms: int) -> FourBitTile:
    """Return the tile of a product of all rows with one matrix of this many rows, on a GPU of `num_sms` SMs.

    One matrix has few tiles: narrow ones and parts of the depth keep all SMs busy. The fastest of those in
    docs/results/gpu-four-bit-dense.json.
    """
    if dtype != torch.bfloat16:
        return SLOW
    if width > BLOCK * num_sms:
        return _tile(num_rows, dtype, width, num_stages=4)
    if num_rows <= 8:
        return FourBitTile(16, BLOCK, 4, 4, 4, unroll=2, early=True, splits=MOST_PARTS.value)
    if num_rows <= 32:
        return FourBitTile(32, BLOCK, 4, 3, 3, unroll=2, early=True, splits=MOST_PARTS.value)
    return FourBitTile(64, BLOCK, 4, 3, 2, unroll=2, early=True, splits=MOST_PARTS.value)


def _tile(mean: float, dtype: torch.dtype, width: int, num_stages: int) -> FourBitTile:
    """Return the tile of either product with more rows; num_stages: with many."""
    columns = min(128, width)
    if dtype != torch.bfloat16:
        return SLOW
    if mean <= 16:
        return FourBitTile(16, columns, 4, 4, 3, early=True)
    if mean <= 64:
        return FourBitTile(64, columns, 4, 4, 2)
    return FourBitTile(128, columns, 8, num_stages, 1)
