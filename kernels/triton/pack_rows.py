"""Packing of x, ids and weights into rows of bytes: one launch instead of three. See `kernels.all2all.payload`.

N rows, D hidden, K experts per row, W bytes of a row.
"""

import torch
import triton
import triton.language as tl

from kernels.block_fp8 import Fp8Rows
from kernels.triton.fp8 import GROUP, quantise

MAX_BLOCK = 4096


@triton.jit
def pack_rows_kernel(
    x_ptr,
    x_stride,
    ids_ptr,
    weights_ptr,
    x_out_ptr,
    scale_out_ptr,
    ids_out_ptr,
    weights_out_ptr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FP8: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Pack one block of columns of one row; the program of the first block also packs ids and weights."""
    row = tl.program_id(0).to(tl.int64)
    if FP8:
        first = tl.program_id(1) * (BLOCK // GROUP)
        groups = first + tl.arange(0, BLOCK // GROUP)
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = groups < HIDDEN // GROUP
        x = tl.load(x_ptr + row * x_stride + columns, mask=inside[:, None], other=0)
        values, scale = quantise(x.to(tl.float32))
        tl.store(x_out_ptr + row * ROW_BYTES + columns, values, mask=inside[:, None])
        tl.store(scale_out_ptr + row * (ROW_BYTES // 4) + groups, scale, mask=inside)
    elif not IN_PLACE:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < HIDDEN)
        element_bytes: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
        tl.store(x_out_ptr + row * (ROW_BYTES // element_bytes) + columns, x, mask=columns < HIDDEN)
    if tl.program_id(1) == 0:
        choices = tl.arange(0, BLOCK_K)
        chosen, out_at = choices < TOP_K, row * (ROW_BYTES // 4) + choices
        ids = tl.load(ids_ptr + row * TOP_K + choices, mask=chosen)
        tl.store(ids_out_ptr + out_at, ids.to(tl.int32), mask=chosen)
        weights = tl.load(weights_ptr + row * TOP_K + choices, mask=chosen)
        tl.store(weights_out_ptr + out_at, weights, mask=chosen)


def pack_rows(
    x_ND: torch.Tensor,
    topk_idx_NK: torch.Tensor,
    topk_weights_NK: torch.Tensor,
    fields: tuple[torch.Tensor | Fp8Rows, torch.Tensor, torch.Tensor],
) -> None:
    """Fill `fields`, which are `RowFormat.fields` of contiguous uint8 [N, W]. The rows of x may be strided.

    An x that is the field itself is not copied. A field in FP8 gets quantised rows.
    """
    x_out, ids_out, weights_out = fields
    fp8 = isinstance(x_out, Fp8Rows)
    values_out, scales_out = x_out if isinstance(x_out, Fp8Rows) else (x_out, x_out)
    (num_rows, hidden), top_k = x_ND.shape, topk_idx_NK.shape[1]
    assert x_ND.stride(1) == 1 and topk_idx_NK.is_contiguous() and topk_weights_NK.is_contiguous()
    block = min(MAX_BLOCK, triton.next_power_of_2(hidden))
    in_place = x_ND.data_ptr() == values_out.data_ptr()
    if num_rows:
        pack_rows_kernel[(num_rows, 1 if in_place else triton.cdiv(hidden, block))](
            x_ND,
            x_ND.stride(0),
            topk_idx_NK,
            topk_weights_NK,
            values_out,
            scales_out,
            ids_out,
            weights_out,
            HIDDEN=hidden,
            TOP_K=top_k,
            ROW_BYTES=values_out.stride(0) * values_out.element_size(),
            BLOCK=block,
            BLOCK_K=triton.next_power_of_2(top_k),
            IN_PLACE=in_place,
            FP8=fp8,
            GROUP=GROUP,
            num_warps=4 if block > 512 and not in_place else 1,
        )
