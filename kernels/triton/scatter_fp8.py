"""Copies of rows in expert order, quantised to e4m3 in groups of 128 unless the rows came so.

The scales have the memory order in which DeepGEMM loads them: those of one group for all permuted rows are contiguous.

N gathered rows, D their width, S = D / 128 groups of a row, K experts per row, R permuted rows.
"""

import torch
import triton
import triton.language as tl

from kernels.block_fp8 import Fp8Rows
from kernels.triton.fp8 import GROUP, quantise


@triton.jit
def scatter_fp8_kernel(
    x_ptr,
    x_stride,
    x_scale_ptr,
    x_scale_row,
    x_scale_group,
    permuted_ptr,
    out_ptr,
    scale_ptr,
    scale_stride,
    num_groups,
    QUANTISED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Quantise and copy some groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = groups < num_groups
    if QUANTISED:
        quantised = tl.load(x_ptr + row * x_stride + columns, mask=inside[:, None], other=0.0)
        scale_at = x_scale_ptr + row * x_scale_row + groups.to(tl.int64) * x_scale_group
        scale = tl.load(scale_at, mask=inside, other=0.0)
    else:
        x = tl.load(x_ptr + row * x_stride + columns, mask=inside[:, None], other=0)
        quantised, scale = quantise(x.to(tl.float32))
    for k in tl.static_range(TOP_K):
        permuted = tl.load(permuted_ptr + row * TOP_K + k).to(tl.int64)
        if permuted >= 0:
            out_at = out_ptr + permuted * num_groups * GROUP + columns
            tl.store(out_at, quantised, mask=inside[:, None])
            tl.store(scale_ptr + groups * scale_stride + permuted, scale, mask=inside)


def scatter_fp8(
    x_ND: torch.Tensor,
    permuted_idx_NK: torch.Tensor,
    num_permuted: int,
    scale_NS: torch.Tensor | None = None,
) -> Fp8Rows:
    """Return e4m3 [R, D] and float32 scales [R, S], contiguous along R. R and D are multiples of 4 and 128.

    scale_NS   scales of x in e4m3, of any strides; None: x is in another dtype
    """
    x_scale = x_ND if scale_NS is None else scale_NS
    num_rows, width = x_ND.shape
    assert x_ND.stride(1) == 1 and permuted_idx_NK.is_contiguous()
    assert width % GROUP == 0 and num_permuted % 4 == 0, (width, num_permuted)
    num_groups = width // GROUP
    out_RD = torch.empty(num_permuted, width, dtype=torch.float8_e4m3fn, device=x_ND.device)
    scale_SR = torch.empty(num_groups, num_permuted, dtype=torch.float32, device=x_ND.device)
    block = min(16, triton.next_power_of_2(num_groups))
    if num_rows:
        scatter_fp8_kernel[(num_rows, triton.cdiv(num_groups, block))](
            x_ND,
            x_ND.stride(0),
            x_scale,
            x_scale.stride(0),
            x_scale.stride(1),
            permuted_idx_NK,
            out_RD,
            scale_SR,
            num_permuted,
            num_groups,
            QUANTISED=scale_NS is not None,
            TOP_K=permuted_idx_NK.shape[1],
            BLOCK_S=block,
            GROUP=GROUP,
            num_warps=4,
        )
    return Fp8Rows(out_RD, scale_SR.t())
