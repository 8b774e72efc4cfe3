"""Triton kernel for the gated norm behind gated delta nets: root-mean-square norm, weight, times SiLU of a gate.

T tokens, V heads, v values of a head.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.delta_gates import silu

HEADS_PER_PROGRAM = 8


# A single row may have any stride.
@triton.jit(do_not_specialize=["gate_row"])
def _gated_norm(
    x_ptr,
    gate_ptr,
    gate_row,
    weight_ptr,
    out_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    mask = (head < NUM_HEADS) & (dim < WIDTH)
    at = head * WIDTH + dim
    x = tl.load(x_ptr + token * (NUM_HEADS * WIDTH) + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_row + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 1, keep_dims=True) / WIDTH
    y = x * tl.rsqrt(mean + eps) * weight * silu(gate)
    out_at = out_ptr + token * (NUM_HEADS * WIDTH) + at
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mask)


def gated_rms_norm(
    x_TVv: torch.Tensor,
    gate_TVv: torch.Tensor,
    weight_v: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(gate) of each head, contiguous, in the dtype of x.

    gate   tokens may be strided, heads are contiguous
    """
    num_tokens, num_heads, width = x_TVv.shape
    assert x_TVv.is_contiguous() and gate_TVv.shape == x_TVv.shape
    assert gate_TVv.stride()[1:] == (width, 1) and weight_v.is_contiguous()
    out = torch.empty_like(x_TVv)
    if num_tokens:
        block = triton.next_power_of_2(width)
        _gated_norm[(num_tokens, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
            x_TVv,
            gate_TVv,
            gate_TVv.stride(0),
            weight_v,
            out,
            eps,
            NUM_HEADS=num_heads,
            WIDTH=width,
            HEADS=HEADS_PER_PROGRAM,
            BLOCK=block,
            num_warps=4,
        )
    return out
