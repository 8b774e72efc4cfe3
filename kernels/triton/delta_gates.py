"""Functions that the Triton kernels of gated delta nets share: gates and activation."""

import torch
import triton
import triton.language as tl
from triton import knobs

from kernels.triton.delta_table import CHUNK, HEADER

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
SIZE: tl.constexpr = tl.constexpr(CHUNK)
CHUNKS_AT: tl.constexpr = tl.constexpr(HEADER)


@triton.jit
def decay_and_beta(a_f32, b_f32, neg_exp_a, dt_bias):
    """Return g = neg_exp_a * softplus(a + dt_bias) and beta = sigmoid(b)."""
    x = a_f32 + dt_bias
    e = tl.exp(tl.minimum(x, 20.0))
    # log(1 + e) has lost the digits of a small e.
    small = e * (1.0 - e * (0.5 - e * 0.33333334))
    softplus = tl.where(x > 20.0, x, tl.where(e < 0.01, small, tl.log(1.0 + e)))
    return neg_exp_a * softplus, tl.sigmoid(b_f32)


@triton.jit
def silu(x_f32):
    """Return SiLU in 5 instructions, of which Triton makes 12 that serve denormals too."""
    if INTERPRETED:
        y = x_f32 * tl.sigmoid(x_f32)
    else:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.ftz.f32 t, $1, 0fBFB8AA3B;  // -log2(e)
            ex2.approx.ftz.f32 t, t;
            add.ftz.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 t, t;
            mul.ftz.f32 $0, $1, t;
            }""",
            "=f,f",
            [x_f32],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def power_of_two(x_f32):
    """Return 2^x, flushed to 0 instead of denormals."""
    if INTERPRETED:
        y = tl.exp2(x_f32)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x_f32], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def silu_rounded(x_f32, dtype: tl.constexpr):
    """Return SiLU, rounded to the dtype of the hidden states, in float32."""
    return silu(x_f32).to(dtype).to(tl.float32)


def precision(dtype: torch.dtype) -> str:
    """Return how products round float32 operands, for hidden states of a dtype: three products keep all digits."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
