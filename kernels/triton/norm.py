"""Triton kernel for a residual add and the root-mean-square norm after it. R rows, D their width."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    eps,
    x_row,
    delta_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(x_ptr + row * x_row + column, mask=mask, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + row * delta_row + column, mask=mask, other=0.0)
        # Rounded before the norm, as when the two are separate operators.
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_row + column, x, mask=mask)
    x_f32 = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x_f32 * x_f32) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    out = (x_f32 * factor * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, out, mask=mask)


def add_rms_norm(
    x_RD: torch.Tensor, delta_RD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """x += delta in place (unless None), then x / sqrt(mean(x^2) + eps) * weight, new and contiguous."""
    num_rows, width = x_RD.shape
    assert x_RD.stride(1) == 1 and (delta_RD is None or delta_RD.stride(1) == 1)
    out_RD = torch.empty((num_rows, width), dtype=x_RD.dtype, device=x_RD.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        _add_rms_norm[(num_rows,)](
            x_RD,
            x_RD if delta_RD is None else delta_RD,
            weight_D,
            out_RD,
            eps,
            x_RD.stride(0),
            x_RD.stride(0) if delta_RD is None else delta_RD.stride(0),
            WIDTH=width,
            BLOCK=block,
            ADD=delta_RD is not None,
            num_warps=max(1, min(16, block // 512)),
        )
    return out_RD
