"""Triton kernel for gates of attention's outputs: norm of each head times SiLU of a gate, or sigmoid of a gate alone.

The first stands behind gated delta nets, the second behind attention with an output gate.

T tokens, V heads, v values of a head, O = V * v.
"""

import torch
import triton
import triton.language as tl

from kernels.block_fp8 import Fp8Rows
from kernels.triton.delta_gates import silu
from kernels.triton.fp8 import GROUP, quantise
from kernels.triton.pdl import begin, dependent_launch
from kernels.triton.quantise_rows import empty_scales

# An H200 takes 53 us for 8,192 tokens of 32 heads of 128 with 32 heads and 8 warps, 92 us with 8 heads and 4 warps.
HEADS_PER_PROGRAM = 32


# A single row may have any stride.
@triton.jit(do_not_specialize=["gate_row", "scale_head"])
def _gated_norm(
    x_ptr,
    gate_ptr,
    gate_row,
    weight_ptr,
    out_ptr,
    scale_ptr,
    scale_head,
    eps,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take HEADS heads of one token. In FP8 a head is a group of values with one scale."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    mask = (head < NUM_HEADS) & (dim < WIDTH)
    at = head * WIDTH + dim
    x = tl.load(x_ptr + token * (NUM_HEADS * WIDTH) + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_row + at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
        mean = tl.sum(x * x, 1, keep_dims=True) / WIDTH
        y = x * tl.rsqrt(mean + eps) * weight * silu(gate)
    else:
        y = x * tl.sigmoid(gate)
    out_at = out_ptr + token * (NUM_HEADS * WIDTH) + at
    if FP8:
        # The result is rounded to the dtype of x first, as separate operators round it.
        values, scale = quantise(y.to(x_ptr.dtype.element_ty).to(tl.float32))
        tl.store(out_at, values, mask=mask)
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        scale_at = scale_ptr + heads.to(tl.int64) * scale_head + token
        tl.store(scale_at, scale, mask=heads < NUM_HEADS)
    else:
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mask)


def gated_rms_norm(
    x_TVv: torch.Tensor,
    gate_TVv: torch.Tensor,
    weight_v: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(gate) of each head, [T, O], in the dtype of x.

    gate   tokens may be strided, heads are contiguous
    """
    out_TO = x_TVv.new_empty(len(x_TVv), x_TVv.shape[1] * x_TVv.shape[2])
    _launch(x_TVv, gate_TVv, weight_v, eps, out_TO)
    return out_TO


def gated_rms_norm_fp8(
    x_TVv: torch.Tensor,
    gate_TVv: torch.Tensor,
    weight_v: torch.Tensor,
    eps: float,
) -> Fp8Rows:
    """As `gated_rms_norm`, with the result in FP8. Heads have 128 values."""
    return _launch_fp8(x_TVv, gate_TVv, weight_v, eps)


def output_gate(x_TO: torch.Tensor, gate_TO: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate), [T, O], in the dtype of x. Rows of the gate may be strided; O is a multiple of 128."""
    out_TO = torch.empty_like(x_TO)
    _launch(_in_groups(x_TO), _in_groups(gate_TO), None, 0.0, out_TO)
    return out_TO


def output_gate_fp8(x_TO: torch.Tensor, gate_TO: torch.Tensor) -> Fp8Rows:
    """As `output_gate`, with the result in FP8."""
    return _launch_fp8(_in_groups(x_TO), _in_groups(gate_TO), None, 0.0)


def _in_groups(x_TO: torch.Tensor) -> torch.Tensor:
    return x_TO.unflatten(1, (-1, GROUP))


def _launch_fp8(
    x_TVv: torch.Tensor, gate_TVv: torch.Tensor, weight_v: torch.Tensor | None, eps: float
) -> Fp8Rows:
    num_tokens, num_heads, width = x_TVv.shape
    assert width == GROUP, width
    shape = (num_tokens, num_heads * width)
    values_TO = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x_TVv.device)
    scale_TV = empty_scales(num_tokens, num_heads, x_TVv.device)
    _launch(x_TVv, gate_TVv, weight_v, eps, values_TO, scale_TV)
    return Fp8Rows(values_TO, scale_TV)


def _launch(
    x_TVv: torch.Tensor,
    gate_TVv: torch.Tensor,
    weight_v: torch.Tensor | None,
    eps: float,
    out_TO: torch.Tensor,
    scale_TV: torch.Tensor | None = None,
) -> None:
    num_tokens, num_heads, width = x_TVv.shape
    assert x_TVv.is_contiguous() and gate_TVv.shape == x_TVv.shape
    assert gate_TVv.stride()[1:] == (width, 1) and (weight_v is None or weight_v.is_contiguous())
    if num_tokens:
        block = triton.next_power_of_2(width)
        heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
        _gated_norm[(num_tokens, triton.cdiv(num_heads, heads))](
            x_TVv,
            gate_TVv,
            gate_TVv.stride(0),
            x_TVv if weight_v is None else weight_v,
            out_TO,
            out_TO if scale_TV is None else scale_TV,
            0 if scale_TV is None else scale_TV.stride(1),
            eps,
            NUM_HEADS=num_heads,
            WIDTH=width,
            HEADS=heads,
            BLOCK=block,
            NORM=weight_v is not None,
            FP8=scale_TV is not None,
            **dependent_launch(num_tokens),
            num_warps=8,
        )
