"""Weights in FP8 with a scale for each block of 128 x 128, the format of DeepSeek's and Qwen3's releases.

A value is its e4m3 times the scale of its block; blocks at the lower and right edges may be smaller. Plain torch, on
any device.

N rows, K columns; leading dimensions are those of the caller.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

BLOCK = 128
MAX_E4M3 = 448.0
ROUNDED_ROWS = 64 * BLOCK  # at a time
MIN_AMAX = 1e-4  # as in kernels.triton.fp8


class Fp8Rows(NamedTuple):
    """Rows for a product with BlockWeights: e4m3 [N, K] and float32 scales [N, K / 128], contiguous along N."""

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class BlockWeights:
    """e4m3 [..., N, K] with float32 scales [..., ceil(N / 128), ceil(K / 128)]."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        return self.values.shape

    @classmethod
    def empty(cls, *shape: int, device: torch.device | str) -> "BlockWeights":
        """Return uninitialised values and scales."""
        scales = (*shape[:-2], *(num_blocks(size) for size in shape[-2:]))
        return cls(
            torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(scales, dtype=torch.float32, device=device),
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Values and scales."""
        return [self.values, self.scales]

    def copy_(self, source: "BlockWeights") -> None:
        """Copy values and scales of the same shapes."""
        self.values.copy_(source.values)
        self.scales.copy_(source.scales)

    def __getitem__(self, index: int | slice) -> "BlockWeights":
        """Return a view of one matrix or a slice of several, or of rows of a single matrix that are whole blocks."""
        if self.values.dim() > 2:
            return BlockWeights(self.values[index], self.scales[index])
        assert isinstance(index, slice), "rows of a matrix"
        assert index.start % BLOCK == 0, index
        assert index.stop % BLOCK == 0 or index.stop == len(self.values), index
        blocks = slice(index.start // BLOCK, num_blocks(index.stop))
        return BlockWeights(self.values[index], self.scales[blocks])


def num_blocks(size: int) -> int:
    """Return the number of blocks of a row or column of `size` values."""
    return -(-size // BLOCK)


def quantise_blocks(weights: torch.Tensor) -> BlockWeights:
    """Return [..., N, K] of any floating dtype in FP8, rounded some rows of a matrix at a time to save memory."""
    result = BlockWeights.empty(*weights.shape, device=weights.device)
    matrices = (weights, result.values, result.scales)
    flat = (tensor.view(-1, *tensor.shape[-2:]) for tensor in matrices)
    for matrix_NK, values_NK, scales in zip(*flat, strict=True):
        for start in range(0, len(matrix_NK), ROUNDED_ROWS):
            rows = slice(start, start + ROUNDED_ROWS)
            blocks = slice(start // BLOCK, (start + ROUNDED_ROWS) // BLOCK)
            _round_into(matrix_NK[rows], values_NK[rows], scales[blocks])
    return result


def _round_into(matrix_NK: torch.Tensor, values_NK: torch.Tensor, scales: torch.Tensor) -> None:
    (rows, columns), (n, k) = matrix_NK.shape, scales.shape
    padding = (0, k * BLOCK - columns, 0, n * BLOCK - rows)
    blocks = F.pad(matrix_NK.float(), padding).view(n, BLOCK, k, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp_(MIN_AMAX) / MAX_E4M3
    rounded_NK = (blocks * (1.0 / scale)).view(n * BLOCK, k * BLOCK)[:rows, :columns]
    values_NK.copy_(rounded_NK)
    scales.copy_(scale.view(n, k))


def quantise_groups(x_NK: torch.Tensor) -> Fp8Rows:
    """Return rows of any floating dtype in FP8, by plain torch. K is a multiple of 128."""
    groups = x_NK.float().reshape(len(x_NK), x_NK.shape[1] // BLOCK, BLOCK)
    scale = groups.abs().amax(2, keepdim=True).clamp_(MIN_AMAX) / MAX_E4M3
    values = (groups * (1.0 / scale)).flatten(1).to(torch.float8_e4m3fn)
    return Fp8Rows(values, scale.squeeze(2).t().contiguous().t())


def widen_rows(rows: Fp8Rows) -> torch.Tensor:
    """Return bfloat16 [N, K] of rows with scales of any strides, in one buffer: the scales are rounded to bfloat16."""
    wide_NK = rows.values.to(torch.bfloat16)
    groups = wide_NK.view(len(wide_NK), -1, BLOCK)
    groups.mul_(rows.scales.to(torch.bfloat16).unsqueeze(2))
    return wide_NK


def dequantise(values_NK: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, K] of e4m3 values and scales of any floating dtype.

    scales   one for each block; or one for each row, [N, 1] or [N]; or one in all, [1] or []
    """
    rows, columns = values_NK.shape
    if scales.numel() == 1:
        return values_NK.float() * scales.float()
    if scales.shape[0] == rows:
        return values_NK.float() * scales.float().view(rows, 1)
    scale_NK = scales.float().repeat_interleave(BLOCK, 0)[:rows]
    return values_NK.float() * scale_NK.repeat_interleave(BLOCK, 1)[:, :columns]
