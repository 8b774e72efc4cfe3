"""Triton kernel that adds rows with a gate of their own: start + y * sigmoid(logit). T rows, D their width."""

import torch
import triton
import triton.language as tl

from kernels.triton.pdl import begin, dependent_launch

MAX_BLOCK = 2048


@triton.jit(do_not_specialize=["logit_ptr"])
def _gated_sum(
    start_ptr,
    y_ptr,
    logit_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take one block of columns of one row."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, mask = row * WIDTH + column, column < WIDTH
    factor = tl.sigmoid(tl.load(logit_ptr + row).to(tl.float32))
    y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    start = tl.load(start_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (start + y * factor).to(out_ptr.dtype.element_ty), mask=mask)


def gated_sum(start_TD: torch.Tensor, y_TD: torch.Tensor, logit_T1: torch.Tensor) -> torch.Tensor:
    """Return start + y * sigmoid(logit), [T, D], a new tensor in the dtype of start. All are contiguous."""
    assert start_TD.is_contiguous() and y_TD.is_contiguous() and logit_T1.is_contiguous()
    assert start_TD.shape == y_TD.shape and logit_T1.numel() == len(y_TD)
    out_TD = torch.empty_like(start_TD)
    num_rows, width = y_TD.shape
    if num_rows:
        block = min(MAX_BLOCK, triton.next_power_of_2(width))
        _gated_sum[(num_rows, triton.cdiv(width, block))](
            start_TD,
            y_TD,
            logit_T1,
            out_TD,
            WIDTH=width,
            BLOCK=block,
            **dependent_launch(num_rows),
            num_warps=4,
        )
    return out_TD
