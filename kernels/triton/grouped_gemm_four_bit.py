"""One product of rows with their experts' weights in four bits; a persistent kernel as kernels.triton.grouped_gemm's.

The kernel reads codes, makes values of them in registers, and the tensor cores multiply these with rows in shared
memory. Weights are the wide side of the product, so that a decode's few rows of an expert waste little. Of few rows,
several programs share the depth of a tile.

W output columns (half of an expert's weight rows where GATED), D input columns, e local experts, R permuted rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.activation import Activation
from kernels.four_bit import BLOCK, FourBitWeights
from kernels.triton.four_bit import SHRUNK, expand, load_codes, load_scales, shrinks
from kernels.triton.four_bit_tiles import FourBitTile
from kernels.triton.gated_activation import activate
from kernels.triton.grouped_gemm import _start, find_tile
from kernels.triton.pdl import begin, dependent_launch
from kernels.triton.split_depth import (
    MOST_TILES,
    add_parts,
    is_last,
    new_sums,
    part_of,
)


@triton.jit
def _product(
    out,
    tile,
    codes_at,
    row_tile,
    factors,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return out + weights @ tile.T of one block of 64 columns; factors are those of `load_scales`."""
    codes = load_codes(codes_at, row_tile, out.shape[0])
    scales, zeros, high_scales, high_zeros = factors
    values = expand(codes, scales, zeros, high_scales, high_zeros, KIND, ZEROS, PACKED, DTYPE)
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
    blocks,
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
    blocks    first block of 64 columns, end, blocks of the expert
    """
    codes_ptr, scales_ptr, zeros_ptr = weights
    first, end, num_blocks = blocks
    row, up_row, num_rows = rows
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    TILE_W: tl.constexpr = out.shape[0]
    row_tile = num_blocks.to(tl.int64) * 2048
    at, up_at = codes_ptr + row // 64 * row_tile, codes_ptr + up_row // 64 * row_tile
    SHRINKS: tl.constexpr = shrinks(KIND, ZEROS, PACKED)
    if SHRINKS:
        out, up = out * (1.0 / SHRUNK), up * (1.0 / SHRUNK)
    for block in tl.range(first, end, loop_unroll_factor=UNROLL):
        places = block * 64 + tl.arange(0, 64)
        if ORDERED:
            places = tl.load(order_at + places)
        tile = tl.load(x_at + places[None, :], mask=inside[:, None], other=0)
        factors = load_scales(
            scales_ptr, zeros_ptr, row, num_rows, block, GROUP, KIND, ZEROS, TILE_W
        )
        out = _product(out, tile, at + block * 2048, row_tile, factors, KIND, ZEROS, PACKED, DTYPE)
        if GATED:
            factors = load_scales(
                scales_ptr, zeros_ptr, up_row, num_rows, block, GROUP, KIND, ZEROS, TILE_W
            )
            up = _product(
                up, tile, up_at + block * 2048, row_tile, factors, KIND, ZEROS, PACKED, DTYPE
            )
    if SHRINKS:
        out, up = out * SHRUNK, up * SHRUNK
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
def _add_parts(out, up, sums_ptr, rows, columns, sizes, counter, inside, GATED: tl.constexpr):
    """Return the sums of all parts of a tile, and whether this program has them; of one part its own.

    rows, columns   of the tile, in the result
    sizes           permuted rows, width
    counter         of the tile; this part, number of parts
    """
    num_permuted, width = sizes
    counter_ptr, part, parts = counter
    row_width = width * 2 if GATED else width
    stride = num_permuted.to(tl.int64) * row_width
    at, inside = sums_ptr + rows[None, :] * row_width + columns[:, None], inside[None, :]
    last = parts == 1
    if parts > 1:
        tl.store(at + part * stride, out, mask=inside)
        if GATED:
            tl.store(at + part * stride + width, up, mask=inside)
        last = is_last(counter_ptr, parts)
        if last:
            out = add_parts(at, stride, parts, inside)
            if GATED:
                up = add_parts(at + width, stride, parts, inside)
    return out, up, last


@triton.jit
def _store(out, up, memory, at, sizes, counter, ACTIVATION: tl.constexpr, SPLIT: tl.constexpr):
    """Store a tile, activated where there is an activation; of several parts the sum, in the program that is last.

    memory   places of the sums of parts and of the result
    at       permuted rows and columns of the tile, which rows are its own
    """
    sums_ptr, out_ptr = memory
    permuted, columns, inside = at
    GATED: tl.constexpr = ACTIVATION is not None
    rows, width = permuted.to(tl.int64), sizes[1]
    if SPLIT:
        out, up, last = _add_parts(out, up, sums_ptr, rows, columns, sizes, counter, inside, GATED)
        inside = inside & last
    if GATED:
        out = activate(out, up, ACTIVATION)
    out_at = out_ptr + rows[:, None] * width + columns[None, :]
    tl.store(out_at, out.T.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _sums_of_tile(
    x,
    weights,
    bias_ptr,
    sizes,
    at,
    share,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    INDEXED: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    PACKED: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_W: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Return float32 [TILE_W, TILE_R] of one part of a tile: biases and products, and those of the up rows.

    x         places of rows, of their indices and of the order of columns, and the stride of rows
    weights   places of codes, scales and zero points
    sizes     width, depth
    at        expert, permuted rows [TILE_R], which of them are its own, first column
    share     this part, number of parts
    """
    x_ptr, x_stride, row_ptr, order_ptr = x
    width, depth = sizes
    expert, permuted, inside, column = at
    part, parts = share
    rows, num_rows = permuted.to(tl.int64), width * 2 if GATED else width
    if INDEXED:
        rows = tl.load(row_ptr + permuted, mask=inside, other=0).to(tl.int64)
    matrix = expert.to(tl.int64) * num_rows
    biased = (column + tl.arange(0, TILE_W) < width) & (part == 0)
    first, end = part_of(part, parts, depth // 64, UNROLL)
    return _multiply(
        *(x_ptr + rows[:, None] * x_stride, order_ptr + expert * depth, inside),
        _start(bias_ptr, matrix + column, biased, HAS_BIAS, TILE_R),
        _start(bias_ptr, matrix + column + width, biased, HAS_BIAS and GATED, TILE_R),
        _weights_at(*weights, matrix, depth, GROUP, KIND),
        *((column, column + width, num_rows), (first, end, depth // 64)),
        *(GATED, GROUP, KIND, ZEROS, ORDERED, PACKED, UNROLL),
    )


@triton.jit(do_not_specialize=["parts", "num_permuted"])
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
    sums_ptr,
    counters_ptr,
    parts,
    num_permuted,
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
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute out[i] = x[row_R[i]] @ weights[expert of i].T, tile by tile; gated where there is an activation."""
    begin(PDL)
    GATED: tl.constexpr = ACTIVATION is not None
    experts = tl.arange(0, EXPERTS_2)
    starts = tl.load(starts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    ends = tl.load(ends_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    column_tiles = tl.cdiv(width, TILE_W)
    num_tiles = tl.sum((ends - starts + TILE_R - 1) // TILE_R) * column_tiles
    for share in tl.range(tl.program_id(0), num_tiles * parts, tl.num_programs(0)):
        tile, part = share // parts, share % parts
        expert, start, end = find_tile(tile // column_tiles, starts, ends, TILE_R)
        permuted = start + tl.arange(0, TILE_R)
        inside = permuted < end
        # The last tile of columns moves back to end with the width, where the width is no multiple of it.
        column = tl.minimum(tile % column_tiles * TILE_W, width - TILE_W)
        columns = column + tl.arange(0, TILE_W)
        out, up = _sums_of_tile(
            *((x_ptr, x_stride, row_ptr, order_ptr), (codes_ptr, scales_ptr, zeros_ptr)),
            *(bias_ptr, (width, depth), (expert, permuted, inside, column), (part, parts)),
            *(HAS_BIAS, GATED, INDEXED, GROUP, KIND, ZEROS, ORDERED, PACKED),
            *(TILE_R, TILE_W, UNROLL),
        )
        _store(
            *(out, up, (sums_ptr, out_ptr), (permuted, columns, inside), (num_permuted, width)),
            *((counters_ptr + tile, part, parts), ACTIVATION, SPLIT),
        )


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
    expected: int | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [R, W] in x's dtype; unused permuted rows are undefined.

    x          rows of D columns, contiguous in the last axis
    row_R      int32 row of x of each permuted row; None: x has the permuted rows
    weights    [e, W, D], gated [e, 2W, D] with gate rows first; tiled; W and D are multiples of 64
    activation   of the gated product; None: the product is not gated
    bias       [e, W], gated [e, 2W], added to the products; contiguous; None: zeros
    starts_e, ends_e   int32: the permuted rows of expert i are starts_e[i] .. ends_e[i] - 1
    packed     expand codes in assembly, for bfloat16 alone; None: where x is in bfloat16
    expected   permuted rows that are used if routing is even; None: all
    counters   those of kernels.triton.split_depth; None: no program shares the depth of a tile
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
    most_tiles, parts = tile.most_tiles(num_permuted, num_experts, width), 1
    if (split := counters is not None and tile.splits > 1) and most_tiles <= MOST_TILES:
        used = num_permuted if expected is None else min(expected, num_permuted)
        parts = tile.parts(tile.most_tiles(used, num_experts, width), depth, num_sms)
    sums = x if parts == 1 else new_sums(parts, num_permuted, weight_rows, x.device)
    grouped_gemm_four_bit_kernel[(min(num_sms * tile.programs_per_sm, most_tiles * parts),)](
        *(x, x.stride(0), x if row_R is None else row_R),
        *(weights.values, weights.scales.view(torch.int32)),
        weights.values if weights.zeros is None else weights.zeros.view(torch.int32),
        starts_e if weights.order is None else weights.order,
        *(starts_e, ends_e, out_RW, width, depth),
        x if bias is None else bias,
        *(sums, counters if split else starts_e, parts, num_permuted),
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        INDEXED=row_R is not None,
        PACKED=x.dtype == torch.bfloat16 if packed is None else packed,
        SPLIT=split,
        **_constants(weights, tile),
        **dependent_launch(early=tile.early),
    )
    return out_RW


def _constants(weights: FourBitWeights, tile: FourBitTile) -> dict[str, Any]:
    """Return the constants that weights and tile set, and the options of the compiler."""
    return {
        "NUM_EXPERTS": len(weights.values),
        "EXPERTS_2": triton.next_power_of_2(len(weights.values)),
        "GROUP": weights.format.group,
        "KIND": weights.format.kind,
        "ZEROS": weights.format.zeros,
        "ORDERED": weights.format.ordered,
        "TILE_R": tile.rows,
        "TILE_W": tile.columns,
        "UNROLL": tile.unroll,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
