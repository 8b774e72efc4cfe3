"""One product of rows with their experts' weights in four bits; a persistent kernel as kernels.triton.grouped_gemm's.

The kernel reads codes, makes values of them in registers, and the tensor cores multiply these with rows in shared
memory. Weights are the wide side of the product, so that a decode's few rows of an expert waste little.

W output columns (half of an expert's weight rows where GATED), D input columns, e local experts, R permuted rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.activation import Activation
from kernels.four_bit import BLOCK, FourBitWeights
from kernels.triton.four_bit import expand, load_codes, load_scales
from kernels.triton.gated_activation import activate
from kernels.triton.grouped_gemm import _find_tile, _start
from kernels.triton.pdl import begin, dependent_launch


@dataclass(frozen=True)
class FourBitTile:
    """A tile of `rows` permuted rows by `columns` outputs, a multiple of 64.

    programs_per_sm   programs that fit on an SM at once
    unroll            blocks of 64 input columns in a stage of the loop
    early             programs start before the kernel before has ended (kernels.triton.pdl)
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    unroll: int = 1
    early: bool = False

    def most_tiles(self, num_permuted: int, num_experts: int, width: int) -> int:
        """Return the largest number of tiles for any distribution of rows to experts."""
        return (num_permuted // self.rows + num_experts) * triton.cdiv(width, self.columns)


# Mean rows of an expert up to which most experts have none: tiles are fewer than SMs, and each reads further ahead.
FEW_ROWS = 0.25
# For other dtypes, in which the kernel serves comparisons alone.
SLOW = FourBitTile(16, BLOCK, 4, 2, 1)


def up_tile(mean: float, dtype: torch.dtype, width: int) -> FourBitTile:
    """Return the tile of a gated product with this mean number of rows of an expert and this many outputs."""
    if dtype != torch.bfloat16:
        return SLOW
    if mean <= FEW_ROWS:
        return FourBitTile(16, 64, 4, 5, 3, unroll=2, early=True)
    if mean <= 16:
        return FourBitTile(16, 64, 4, 4, 4, unroll=2, early=True)
    if (
        mean <= 64
    ):  # 0.71 to 0.8 of the time of 32 and 64 rows by 64 columns, docs/results/gpu-four-bit.json
        return FourBitTile(64, min(128, width), 4, 4, 2)
    return FourBitTile(128, min(128, width), 8, 3, 1)


def down_tile(mean: float, dtype: torch.dtype, width: int) -> FourBitTile:
    """Return the tile of a product that is not gated, see `up_tile`."""
    if dtype != torch.bfloat16:
        return SLOW
    if mean <= FEW_ROWS:
        return FourBitTile(16, 64, 4, 5, 3, unroll=2, early=True)
    if mean <= 16:
        return FourBitTile(16, 64, 4, 4, 4, unroll=2, early=True)
    if mean <= 64:
        return FourBitTile(64, min(128, width), 4, 4, 2)
    return FourBitTile(128, min(128, width), 8, 4, 1)


@triton.jit
def _product(
    out,
    tile,
    codes_at,
    row_tile,
    factors,
    KIND: tl.constexpr,
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return out + weights @ tile.T of one block of 64 columns; factors are those of `load_scales`."""
    codes = load_codes(codes_at, row_tile, out.shape[0])
    scales, zeros, high_scales, high_zeros = factors
    values = expand(codes, scales, zeros, high_scales, high_zeros, KIND, PACKED, DTYPE)
    return tl.dot(values, tile.T, out, input_precision="ieee")


@triton.jit
def _multiply(
    x_at,
    order_at,
    inside,
    out,
    up,
    weights,
    rows,
    num_blocks,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    PACKED: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Return float32 [TILE_W, TILE_R]: out + weights @ x.T, and up + those of the up rows @ x.T.

    weights   places of codes, scales and zero points of the expert
    rows      first weight row, first up row, weight rows of the expert
    """
    codes_ptr, scales_ptr, zeros_ptr = weights
    row, up_row, num_rows = rows
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    TILE_W: tl.constexpr = out.shape[0]
    row_tile = num_blocks.to(tl.int64) * 2048
    at, up_at = codes_ptr + row // 64 * row_tile, codes_ptr + up_row // 64 * row_tile
    for block in tl.range(0, num_blocks, loop_unroll_factor=UNROLL):
        places = block * 64 + tl.arange(0, 64)
        if ORDERED:
            places = tl.load(order_at + places)
        tile = tl.load(x_at + places[None, :], mask=inside[:, None], other=0)
        factors = load_scales(
            scales_ptr, zeros_ptr, row, num_rows, block, GROUP, KIND, ZEROS, TILE_W
        )
        out = _product(out, tile, at + block * 2048, row_tile, factors, KIND, PACKED, DTYPE)
        if GATED:
            factors = load_scales(
                scales_ptr, zeros_ptr, up_row, num_rows, block, GROUP, KIND, ZEROS, TILE_W
            )
            up = _product(up, tile, up_at + block * 2048, row_tile, factors, KIND, PACKED, DTYPE)
    return out, up


@triton.jit
def _weights_at(
    codes_ptr, scales_ptr, zeros_ptr, row, depth, GROUP: tl.constexpr, KIND: tl.constexpr
):
    """Return the places of codes, and of scales and zero points in 32-bit words, from a weight row on."""
    words = row * (depth // GROUP) // 4
    scale_words = words * 2 if KIND == "int4" else row * tl.cdiv(depth, 128)
    return codes_ptr + row * (depth // 2), scales_ptr + scale_words, zeros_ptr + words


@triton.jit
def grouped_gemm_four_bit_kernel(
    x_ptr,
    x_stride,
    row_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    order_ptr,
    starts_ptr,
    ends_ptr,
    out_ptr,
    width,
    depth,
    bias_ptr,
    HAS_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INDEXED: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    PACKED: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_W: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute out[i] = x[row_R[i]] @ weights[expert of i].T, tile by tile; gated where there is an activation."""
    begin(PDL)
    GATED: tl.constexpr = ACTIVATION is not None
    experts = tl.arange(0, EXPERTS_2)
    starts = tl.load(starts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    ends = tl.load(ends_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    column_tiles, num_rows = tl.cdiv(width, TILE_W), width * 2 if GATED else width
    num_tiles = tl.sum((ends - starts + TILE_R - 1) // TILE_R) * column_tiles
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, start, end = _find_tile(tile // column_tiles, starts, ends, TILE_R)
        # The last tile of columns moves back to end with the width, where the width is no multiple of it.
        column = tl.minimum(tile % column_tiles * TILE_W, width - TILE_W)
        permuted = start + tl.arange(0, TILE_R)
        inside, rows = permuted < end, permuted.to(tl.int64)
        if INDEXED:
            rows = tl.load(row_ptr + permuted, mask=inside, other=0).to(tl.int64)
        matrix, columns = expert.to(tl.int64) * num_rows, column + tl.arange(0, TILE_W)
        weights = _weights_at(codes_ptr, scales_ptr, zeros_ptr, matrix, depth, GROUP, KIND)
        whole = columns < width
        out, up = _multiply(
            *(x_ptr + rows[:, None] * x_stride, order_ptr + expert * depth, inside),
            _start(bias_ptr, matrix + column, whole, HAS_BIAS, TILE_R),
            _start(bias_ptr, matrix + column + width, whole, HAS_BIAS and GATED, TILE_R),
            *(weights, (column, column + width, num_rows), depth // 64),
            *(GATED, GROUP, KIND, ZEROS, ORDERED, PACKED, UNROLL),
        )
        if GATED:
            out = activate(out, up, ACTIVATION)
        out_at = out_ptr + permuted.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(out_at, out.T.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def grouped_gemm_four_bit(
    x: torch.Tensor,
    row_R: torch.Tensor | None,
    weights: FourBitWeights,
    starts_e: torch.Tensor,
    ends_e: torch.Tensor,
    num_permuted: int,
    *,
    activation: Activation | None,
    tile: FourBitTile,
    num_sms: int,
    bias: torch.Tensor | None = None,
    packed: bool | None = None,
) -> torch.Tensor:
    """Return [R, W] in x's dtype; unused permuted rows are undefined.

    x          rows of D columns, contiguous in the last axis
    row_R      int32 row of x of each permuted row; None: x has the permuted rows
    weights    [e, W, D], gated [e, 2W, D] with gate rows first; tiled; W and D are multiples of 64
    activation   of the gated product; None: the product is not gated
    bias       [e, W], gated [e, 2W], added to the products; contiguous; None: zeros
    starts_e, ends_e   int32: the permuted rows of expert i are starts_e[i] .. ends_e[i] - 1
    packed     expand codes in assembly, for bfloat16 alone; None: where x is in bfloat16
    """
    num_experts, weight_rows, depth = weights.shape
    width = weight_rows // 2 if activation else weight_rows
    assert weights.tiled and x.stride(1) == 1 and x.shape[1] == depth
    assert all(tensor.is_contiguous() for tensor in weights.tensors)
    assert width % BLOCK == 0 and width >= tile.columns, (width, tile)
    out_RW = torch.empty(num_permuted, width, dtype=x.dtype, device=x.device)
    if not num_permuted or not num_experts:
        return out_RW
    assert bias is None or (bias.is_contiguous() and bias.shape == (num_experts, weight_rows))
    most_tiles = tile.most_tiles(num_permuted, num_experts, width)
    grouped_gemm_four_bit_kernel[(min(num_sms * tile.programs_per_sm, most_tiles),)](
        *(x, x.stride(0), x if row_R is None else row_R),
        *(weights.values, weights.scales.view(torch.int32)),
        weights.values if weights.zeros is None else weights.zeros.view(torch.int32),
        starts_e if weights.order is None else weights.order,
        *(starts_e, ends_e, out_RW, width, depth),
        x if bias is None else bias,
        HAS_BIAS=bias is not None,
        NUM_EXPERTS=num_experts,
        EXPERTS_2=triton.next_power_of_2(num_experts),
        ACTIVATION=activation,
        INDEXED=row_R is not None,
        GROUP=weights.format.group,
        KIND=weights.format.kind,
        ZEROS=weights.format.zeros,
        ORDERED=weights.format.ordered,
        PACKED=x.dtype == torch.bfloat16 if packed is None else packed,
        TILE_R=tile.rows,
        TILE_W=tile.columns,
        UNROLL=tile.unroll,
        **dependent_launch(early=tile.early),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_RW
