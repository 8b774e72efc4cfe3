"""Copies of rows in expert order: a row is read once for any number of experts.

N gathered rows, D their width, K experts per row, R permuted rows.
"""

import torch
import triton
import triton.language as tl

MAX_BLOCK = 4096


@triton.jit
def scatter_rows_kernel(
    x_ptr, x_stride, permuted_ptr, out_ptr, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy one block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < width, other=0)
    for k in tl.static_range(TOP_K):
        permuted = tl.load(permuted_ptr + row * TOP_K + k).to(tl.int64)
        if permuted >= 0:
            tl.store(out_ptr + permuted * width + columns, x, mask=columns < width)


def scatter_rows(
    x_ND: torch.Tensor, permuted_idx_NK: torch.Tensor, num_permuted: int
) -> torch.Tensor:
    """Return [R, D] with a copy of row n at each index of permuted_idx_NK[n] but -1; unused rows are undefined."""
    num_rows, width = x_ND.shape
    assert x_ND.stride(1) == 1 and permuted_idx_NK.is_contiguous()
    out_RD = torch.empty(num_permuted, width, dtype=x_ND.dtype, device=x_ND.device)
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
