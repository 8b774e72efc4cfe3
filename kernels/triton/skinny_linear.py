"""Product of few rows with a weight matrix, bound by reading the weights: each program reads whole rows of them.

A library splits skinny products into tiles for tensor cores, too few to keep all of the memory busy. Here a program
holds the weights of a few outputs in registers, read before it waits for the kernel that writes the rows (see
`kernels.triton.pdl`), and multiplies all rows with them. Sums are in float32.

T rows, D inputs, W outputs.
"""

import functools

import torch
import triton
import triton.language as tl

from kernels.block_fp8 import BLOCK, BlockWeights
from kernels.triton.pdl import begin, dependent_launch

# Most rows of a product with deep rows, and with weights of up to SMALL_BYTES: a skinny form of any other product is no
# faster than cuBLAS. H200, 1 and 4 rows, us: 2048 x 4096 6.3 and 8.2 (8.8 and 8.6); 128 x 2048 1.3 and 1.5 (4.9).
MOST_DEEP_ROWS, MOST_SMALL_ROWS = 4, 32
DEEP, SMALL_BYTES = 4096, 2**20
# Most deep rows of weights in FP8 that `hopper_skinny_fp8` takes too, and its MOST_WEIGHTS, because not every GPU can
# import it. One H200, 2048 x 4096 with the kernel before and the norm behind, us: 11.8 for 4 rows, there 9.9 for 8.
MOST_ROWS_BESIDE_TENSOR_CORES, MOST_TENSOR_CORE_WEIGHTS = 2, 2**24
HOPPER = 9  # compute capability, major
ROWS_OF_A_PROGRAM = 4
# Bytes of a program's weights, which it holds in registers beside the rows, in each warp.
WARP_BYTES = 4096
MOST_DEPTH = 8192
FP8_BLOCK = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["start_row", "width", "num_rows"])
def _skinny_linear(
    x_ptr,
    x_row,
    weight_ptr,
    scale_ptr,
    start_ptr,
    start_row,
    out_ptr,
    width,
    num_rows,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
    START: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute TILE outputs of ROWS rows."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, BLOCK_D)[None, :]
    inside = (column < width)[:, None] & (depth < DEPTH)
    weight_at = weight_ptr + column[:, None].to(tl.int64) * DEPTH + depth
    weights = tl.load(weight_at, mask=inside, other=0.0).to(tl.float32)
    if FP8:
        groups: tl.constexpr = (DEPTH + FP8_BLOCK - 1) // FP8_BLOCK
        scale_at = scale_ptr + tl.program_id(0) * TILE // FP8_BLOCK * groups + depth // FP8_BLOCK
        scales = tl.load(scale_at, mask=depth < DEPTH, other=0.0)
    begin(PDL)
    # Rows beyond the last repeat it: a mask would keep their loads apart.
    row = tl.minimum(tl.program_id(1) * ROWS + tl.arange(0, ROWS), num_rows - 1)
    x_at = x_ptr + row[:, None, None] * x_row + depth[None]
    x = tl.load(x_at, mask=(depth < DEPTH)[None], other=0.0).to(tl.float32)
    if FP8:
        x *= scales[None]
    out = tl.sum(x * weights[None], 2)
    here = (column < width)[None, :]
    if START:
        start_at = start_ptr + row[:, None] * start_row + column[None, :]
        out += tl.load(start_at, mask=here, other=0.0).to(tl.float32)
    out_at = out_ptr + row[:, None] * width + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=here)


def takes_skinny(x_TD: torch.Tensor, weights: torch.Tensor | BlockWeights) -> bool:
    """Return whether `skinny_linear` computes this product, and faster than a library."""
    num_rows, depth = x_TD.shape
    most = MOST_DEEP_ROWS if depth >= DEEP else 0
    if most and _has_tensor_cores(weights):
        most = MOST_ROWS_BESIDE_TENSOR_CORES
    if _small(weights):
        most = MOST_SMALL_ROWS
    return 0 < num_rows <= most and depth <= MOST_DEPTH and x_TD.stride(1) == 1


def _has_tensor_cores(weights: torch.Tensor | BlockWeights) -> bool:
    """Return whether `hopper_skinny_fp8` takes such weights, which are in FP8."""
    few = isinstance(weights, BlockWeights) and weights.values.numel() <= MOST_TENSOR_CORE_WEIGHTS
    return few and _hopper()


@functools.cache
def _hopper() -> bool:
    """Return whether this GPU runs `hopper_skinny_fp8`."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER


def _small(weights: torch.Tensor | BlockWeights) -> bool:
    """Return whether the weights are read in less time than a kernel takes to start."""
    values = weights.values if isinstance(weights, BlockWeights) else weights
    return values.numel() * values.element_size() <= SMALL_BYTES


def skinny_linear(
    x_TD: torch.Tensor,
    weights_WD: torch.Tensor | BlockWeights,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return start + x @ weights.T, [T, W] in x's dtype.

    x         rows maybe strided
    weights   contiguous
    start     [T, W] or [W], added before the sum is rounded; None: zeros
    """
    fp8 = isinstance(weights_WD, BlockWeights)
    if isinstance(weights_WD, BlockWeights):
        values, scales = weights_WD.values, weights_WD.scales
    else:
        values = scales = weights_WD
    (num_rows, depth), width = x_TD.shape, values.shape[0]
    assert values.is_contiguous() and scales.is_contiguous()
    out_TW = torch.empty(num_rows, width, dtype=x_TD.dtype, device=x_TD.device)
    start_row = 0 if start is None or start.dim() == 1 else start.stride(0)
    block = triton.next_power_of_2(depth)
    rows = min(ROWS_OF_A_PROGRAM, triton.next_power_of_2(num_rows))
    num_warps = 8 if rows == ROWS_OF_A_PROGRAM and depth >= DEEP else 4
    tile = max(1, num_warps * WARP_BYTES // values.element_size() // block)
    assert not fp8 or BLOCK % tile == 0, "a program's outputs have the scales of one row of blocks"
    _skinny_linear[(triton.cdiv(width, tile), triton.cdiv(num_rows, rows))](
        x_TD,
        x_TD.stride(0),
        values,
        scales,
        x_TD if start is None else start,
        start_row,
        out_TW,
        width,
        num_rows,
        ROWS=rows,
        DEPTH=depth,
        BLOCK_D=block,
        TILE=tile,
        FP8=fp8,
        START=start is not None,
        **dependent_launch(num_rows),
        num_warps=num_warps,
    )
    return out_TW
