"""Weights in four bits to bfloat16, in memory, for products of so many rows that a library's kernel pays for the copy.

N rows, K columns.
"""

import torch
import triton
import triton.language as tl

from kernels.four_bit import BLOCK, FourBitWeights
from kernels.triton.four_bit import SHRUNK, expand, load_codes, load_scales, shrinks

ROWS = 64  # of a program, which expands all columns of its rows


@triton.jit
def expand_four_bit_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    order_ptr,
    out_ptr,
    num_rows,
    depth,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Expand ROWS rows of up to BLOCKS blocks of 64 columns."""
    row = tl.program_id(0) * ROWS
    tile_stride = (depth // 64).to(tl.int64) * 2048
    at = codes_ptr + row // 64 * tile_stride
    rows = row + tl.arange(0, ROWS)
    out_at = out_ptr + rows[:, None].to(tl.int64) * depth
    first = tl.program_id(1) * BLOCKS
    for block in range(first, tl.minimum(first + BLOCKS, depth // 64)):
        codes = load_codes(at + block * 2048, tile_stride, ROWS)
        factors = load_scales(scales_ptr, zeros_ptr, row, num_rows, block, GROUP, KIND, ZEROS, ROWS)
        values = expand(codes, *factors, KIND, ZEROS, PACKED, out_ptr.dtype.element_ty)
        if shrinks(KIND, ZEROS, PACKED):
            values = (values.to(tl.float32) * SHRUNK).to(out_ptr.dtype.element_ty)
        columns = block * 64 + tl.arange(0, 64)
        if ORDERED:
            columns = tl.load(order_ptr + columns)
        tl.store(out_at + columns[None, :], values)


def expand_four_bit(
    weights_NK: FourBitWeights, dtype: torch.dtype, packed: bool | None = None
) -> torch.Tensor:
    """Return the values [N, K] in `dtype`, a new tensor; columns in the order of the input.

    weights   one tiled matrix
    packed    expand codes in assembly, for bfloat16 alone; None: where `dtype` is bfloat16
    """
    num_rows, depth = weights_NK.shape
    form = weights_NK.format
    assert weights_NK.tiled and all(tensor.is_contiguous() for tensor in weights_NK.tensors)
    out_NK = torch.empty(num_rows, depth, dtype=dtype, device=weights_NK.values.device)
    zeros, order = weights_NK.zeros, weights_NK.order
    blocks_of_a_program = 8
    grid = (num_rows // ROWS, triton.cdiv(depth // BLOCK, blocks_of_a_program))
    expand_four_bit_kernel[grid](
        *(weights_NK.values, weights_NK.scales.view(torch.int32)),
        weights_NK.values if zeros is None else zeros.view(torch.int32),
        weights_NK.values if order is None else order,
        *(out_NK, num_rows, depth),
        GROUP=form.group,
        KIND=form.kind,
        ZEROS=form.zeros,
        ORDERED=form.ordered,
        PACKED=dtype == torch.bfloat16 if packed is None else packed,
        ROWS=ROWS,
        BLOCKS=blocks_of_a_program,
        num_warps=4,
    )
    return out_NK
