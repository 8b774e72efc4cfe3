"""Copies each row to its places in expert order: a row is read once, however many experts it has.

N rows, D their width, K places per row, R places.
"""

import torch
import triton
import triton.language as tl

MAX_BLOCK = 4096


@triton.jit
def scatter_rows_kernel(
    x_ptr, x_stride, place_ptr, out_ptr, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < width, other=0)
    for k in tl.static_range(TOP_K):
        place = tl.load(place_ptr + row * TOP_K + k).to(tl.int64)
        if place >= 0:
            tl.store(out_ptr + place * width + columns, x, mask=columns < width)


def scatter_rows(
    x_ND: torch.Tensor, permuted_idx_NK: torch.Tensor, num_places: int
) -> torch.Tensor:
    """[R, D] with row n at each of permuted_idx_NK[n]; -1 goes nowhere, and other places stay as they were."""
    num_rows, width = x_ND.shape
    assert x_ND.stride(1) == 1 and permuted_idx_NK.is_contiguous()
    out_RD = torch.empty(num_places, width, dtype=x_ND.dtype, device=x_ND.device)
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    if num_rows:
        scatter_rows_kernel[(num_rows, triton.cdiv(width, block))](
            x_ND,
            x_ND.stride(0),
            permuted_idx_NK,
            out_RD,
            width,
            TOP_K=permuted_idx_NK.shape[1],
            BLOCK=block,
            num_warps=4 if block > 512 else 1,
        )
    return out_RD
