"""Triton kernel for a residual addition followed by a root-mean-square norm, and a product of its rows with a vector.

R rows of D values, S = D / 128.
"""

import torch
import triton
import triton.language as tl

from kernels.block_fp8 import Fp8Rows
from kernels.triton.fp8 import GROUP, quantise
from kernels.triton.pdl import begin, dependent_launch
from kernels.triton.quantise_rows import empty_scales

Gate = tuple[torch.Tensor, torch.Tensor]


@triton.jit(do_not_specialize=["scale_group"])
def _add_rms_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    plain_ptr,
    scale_ptr,
    gate_ptr,
    logit_ptr,
    eps,
    x_row,
    delta_row,
    delta_part,
    out_row,
    scale_group,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    FP8: tl.constexpr,
    PLAIN: tl.constexpr,
    GATE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(x_ptr + row * x_row + column, mask=mask, other=0.0)
    if PARTS:
        delta = tl.load(delta_ptr + row * delta_row + column, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            part_ptr = delta_ptr + part * delta_part + row * delta_row
            delta += tl.load(part_ptr + column, mask=mask, other=0.0).to(tl.float32)
        # Both sums are rounded, as separate operators round them.
        delta = delta.to(delta_ptr.dtype.element_ty).to(tl.float32)
        x = (x.to(tl.float32) + delta).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_row + column, x, mask=mask)
    x_f32 = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x_f32 * x_f32) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    out = x_f32 * factor * weight
    # The norm is rounded to the dtype of x first, as separate operators round it.
    rounded = out.to(x_ptr.dtype.element_ty)
    if GATE:
        gate = tl.load(gate_ptr + column, mask=mask, other=0.0).to(tl.float32)
        logit = tl.sum(rounded.to(tl.float32) * gate)
        tl.store(logit_ptr + row, logit.to(logit_ptr.dtype.element_ty))
    if FP8:
        groups = tl.arange(0, BLOCK // GROUP)
        if PLAIN:
            tl.store(plain_ptr + row * WIDTH + column, rounded, mask=mask)
        values, scale = quantise(tl.reshape(rounded.to(tl.float32), (BLOCK // GROUP, GROUP)))
        tl.store(out_ptr + row * out_row + column, tl.reshape(values, (BLOCK,)), mask=mask)
        scale_at = scale_ptr + groups.to(tl.int64) * scale_group + row
        tl.store(scale_at, scale, mask=groups < WIDTH // GROUP)
    else:
        tl.store(out_ptr + row * out_row + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(
    x_RD: torch.Tensor,
    delta_RD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    out_RD: torch.Tensor | None = None,
    gate: Gate | None = None,
) -> torch.Tensor:
    """Add delta to x in place (None: add nothing), then return x / sqrt(mean(x^2) + eps) * weight.

    delta_RD    or partial sums [P, R, D], which are added in order, in float32
    out_RD      receives the result; its rows may be strided, and it may be x. None: a new contiguous tensor
    gate        a weight [D], and [R, 1] that receives the products of the result's rows with it; None: none
    """
    if out_RD is None:
        out_RD = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
    _launch(x_RD, delta_RD, weight_D, eps, out_RD, gate=gate)
    return out_RD


def add_rms_norm_fp8(
    x_RD: torch.Tensor,
    delta_RD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    plain_RD: torch.Tensor | None = None,
    gate: Gate | None = None,
) -> Fp8Rows:
    """As `add_rms_norm`, with the result in FP8. D is a multiple of 128.

    plain_RD   contiguous, receives the result in the dtype of x too
    """
    num_rows, width = x_RD.shape
    assert width % GROUP == 0, width
    values_RD = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x_RD.device)
    scale_RS = empty_scales(num_rows, width // GROUP, x_RD.device)
    assert plain_RD is None or plain_RD.is_contiguous()
    _launch(x_RD, delta_RD, weight_D, eps, values_RD, scale_RS, plain_RD, gate)
    return Fp8Rows(values_RD, scale_RS)


def _launch(
    x_RD: torch.Tensor,
    delta_RD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    out_RD: torch.Tensor,
    scale_RS: torch.Tensor | None = None,
    plain_RD: torch.Tensor | None = None,
    gate: Gate | None = None,
) -> None:
    num_rows, width = x_RD.shape
    gate_D, logit_R1 = (weight_D, out_RD) if gate is None else gate
    assert gate is None or (logit_R1.shape == (num_rows, 1) and gate_D.shape == (width,))
    assert gate_D.is_contiguous() and (gate is None or logit_R1.is_contiguous())
    parts = 0 if delta_RD is None else delta_RD.shape[0] if delta_RD.dim() == 3 else 1
    delta_RD = x_RD if delta_RD is None else delta_RD
    assert delta_RD.shape[-2:] == out_RD.shape == x_RD.shape
    assert x_RD.stride(1) == delta_RD.stride(-1) == out_RD.stride(1) == 1
    if num_rows:
        block = triton.next_power_of_2(width)
        _add_rms_norm[(num_rows,)](
            x_RD,
            delta_RD,
            weight_D,
            out_RD,
            out_RD if plain_RD is None else plain_RD,
            out_RD if scale_RS is None else scale_RS,
            gate_D,
            logit_R1,
            eps,
            x_RD.stride(0),
            delta_RD.stride(-2),
            delta_RD.stride(0) if parts > 1 else 0,
            out_RD.stride(0),
            0 if scale_RS is None else scale_RS.stride(1),
            WIDTH=width,
            BLOCK=block,
            PARTS=parts,
            FP8=scale_RS is not None,
            PLAIN=plain_RD is not None,
            GATE=gate is not None,
            GROUP=GROUP,
            **dependent_launch(num_rows),
            num_warps=max(1, min(16, block // 512)),
        )
