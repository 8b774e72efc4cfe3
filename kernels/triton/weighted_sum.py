"""Weighted sums of each row's expert outputs in float32, without atomics: equal inputs give equal bits.

N gathered rows, D their width, K experts per row, R permuted rows.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.pdl import begin, dependent_launch

MAX_BLOCK = 2048


@triton.jit(do_not_specialize=["kept_first", "kept_end"])
def weighted_sum_kernel(
    y_ptr,
    permuted_ptr,
    weight_ptr,
    weight_stride,
    out_ptr,
    kept_ptr,
    kept_first,
    kept_end,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum one block of columns of one row; experts of other ranks are masked."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        permuted = tl.load(permuted_ptr + row * TOP_K + k).to(tl.int64)
        weight = tl.load(weight_ptr + row * weight_stride + k)
        here = (columns < width) & (permuted >= 0)
        y = tl.load(y_ptr + permuted * width + columns, mask=here, other=0)
        total += tl.where(permuted >= 0, weight, 0.0) * y.to(tl.float32)
    if row >= kept_first and row < kept_end:
        out_ptr = kept_ptr
    out_at = out_ptr + row * width + columns
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=columns < width)


def weighted_sum(
    y_RD: torch.Tensor,
    permuted_idx_NK: torch.Tensor,
    topk_weights_NK: torch.Tensor,
    kept: tuple[int, int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return [N, D] in y's dtype, zeros for rows without local experts.

    topk_weights_NK   float32, rows may be strided
    kept              (first, end, kept_ND): rows first to end - 1 go to the same rows of kept_ND, and are undefined in
                      the result
    """
    num_rows, width = permuted_idx_NK.shape[0], y_RD.shape[1]
    assert (
        y_RD.is_contiguous() and permuted_idx_NK.is_contiguous() and topk_weights_NK.stride(1) == 1
    )
    out_ND = torch.empty(num_rows, width, dtype=y_RD.dtype, device=y_RD.device)
    first, end, kept_ND = kept or (0, 0, out_ND)
    assert kept_ND.shape == out_ND.shape and kept_ND.is_contiguous()
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    if num_rows:
        weighted_sum_kernel[(num_rows, triton.cdiv(width, block))](
            y_RD,
            permuted_idx_NK,
            topk_weights_NK,
            topk_weights_NK.stride(0),
            out_ND,
            kept_ND,
            first,
            end,
            width,
            TOP_K=permuted_idx_NK.shape[1],
            BLOCK=block,
            **dependent_launch(num_rows),
            num_warps=4 if block > 512 else 1,
        )
    return out_ND
