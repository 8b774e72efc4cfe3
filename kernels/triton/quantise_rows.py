"""Rows quantised to e4m3 in groups of 128, in their order.

The scales have the memory order in which DeepGEMM loads them: the scales of one group for all rows are contiguous, and
begin at a multiple of 16 bytes.

N rows, D their width, S = D / 128 groups of a row.
"""

import torch
import triton
import triton.language as tl

from kernels.block_fp8 import Fp8Rows
from kernels.triton.fp8 import GROUP, quantise
from kernels.triton.pdl import begin, dependent_launch

SCALES_ALIGNMENT = 4  # float32 values of 16 bytes


@triton.jit
def quantise_part(
    x_ptr,
    x_stride,
    out_ptr,
    scale_ptr,
    scale_stride,
    num_groups,
    row,
    part,
    BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Quantise groups part * BLOCK_S to part * BLOCK_S + BLOCK_S - 1 of one row."""
    row = row.to(tl.int64)
    groups = part * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = groups < num_groups
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside[:, None], other=0)
    quantised, scale = quantise(x.to(tl.float32))
    tl.store(out_ptr + row * num_groups * GROUP + columns, quantised, mask=inside[:, None])
    tl.store(scale_ptr + groups.to(tl.int64) * scale_stride + row, scale, mask=inside)


@triton.jit(do_not_specialize=["scale_stride"])
def quantise_rows_kernel(
    x_ptr,
    x_stride,
    out_ptr,
    scale_ptr,
    scale_stride,
    num_groups,
    BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise some groups of one row."""
    begin(PDL)
    rows = (x_ptr, x_stride, out_ptr, scale_ptr, scale_stride, num_groups)
    quantise_part(*rows, tl.program_id(0), tl.program_id(1), BLOCK_S, GROUP)


def empty_scales(num_rows: int, num_groups: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised float32 scales [N, S], contiguous along N."""
    stride = -(-num_rows // SCALES_ALIGNMENT) * SCALES_ALIGNMENT
    scale_SN = torch.empty(num_groups, stride, dtype=torch.float32, device=device)
    return scale_SN[:, :num_rows].t()


def empty_rows(x_ND: torch.Tensor) -> Fp8Rows:
    """Return uninitialised rows in FP8 for those of x."""
    num_rows, width = x_ND.shape
    assert x_ND.stride(1) == 1 and width % GROUP == 0, (x_ND.shape, x_ND.stride())
    out_ND = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x_ND.device)
    return Fp8Rows(out_ND, empty_scales(num_rows, width // GROUP, x_ND.device))


def parts_of_row(width: int) -> tuple[int, int]:
    """Return the parts of a row of `width` values, and the groups of a part."""
    num_groups = width // GROUP
    block = min(16, triton.next_power_of_2(num_groups))
    return triton.cdiv(num_groups, block), block


def quantise_rows(x_ND: torch.Tensor, *, early: bool = True) -> Fp8Rows:
    """Return rows in FP8. D is a multiple of 128; the rows of x may be strided.

    early   of few rows, the kernel starts before the one before has ended (kernels.triton.pdl)
    """
    (num_rows, width), found = x_ND.shape, empty_rows(x_ND)
    parts, block = parts_of_row(width)
    if num_rows:
        quantise_rows_kernel[(num_rows, parts)](
            x_ND,
            x_ND.stride(0),
            *found,
            found.scales.stride(1),
            width // GROUP,
            BLOCK_S=block,
            GROUP=GROUP,
            **dependent_launch(num_rows, early=early),
            num_warps=4,
        )
    return found
