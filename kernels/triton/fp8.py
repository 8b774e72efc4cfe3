"""The rounding to e4m3 that our kernels share: a float32 scale per group of 128 values along a row."""

import triton
import triton.language as tl

GROUP = 128
MAX_E4M3 = tl.constexpr(448.0)
# Groups of zeros get a finite scale; DeepGEMM's own casts have the same.
MIN_AMAX = tl.constexpr(1e-4)


@triton.jit
def quantise(x):
    """float32 [S, GROUP] -> e4m3 of the same shape, float32 scales [S]."""
    scale = tl.maximum(tl.max(tl.abs(x), 1), MIN_AMAX) / MAX_E4M3
    return (x * (1.0 / scale)[:, None]).to(tl.float8e4nv), scale
