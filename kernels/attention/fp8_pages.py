"""K and V in e4m3 with a scale for each token and head: the views of a cache, rounding to it and back, in torch.

A scale is a power of two, kept as the biased exponent that float32 has: one byte. It puts the largest value of a head
between 128 and 256, below the largest of e4m3 (448). So values keep their 4 significant bits down to 2^-14 of the
largest, no calibration is needed, and the rounded value is exact in bfloat16 and float32. The new rows that attention
reads are rounded too, so that a token has one K and one V, whether it is read as a new row or from the cache.

Heads of zeros, and those below 2^-88, share the scale 2^-95. Attention adds up the inverse scales of V, and a smaller
scale would let the sum overflow.

T tokens, L keys, h KV heads, d head dim.
"""

from collections.abc import Sequence

import torch

from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.kv_layout import PagedFp8Heads

MANTISSA_BITS = 23  # of float32
ONE_SIDE = 254  # biased exponents of a power of two and of its inverse add up to it
BELOW_TOP = 7  # binary digits before the point of a head's largest value, less one
MIN_EXPONENT, MAX_EXPONENT = 32, 247  # of scales from 2^-95 to 2^120


class Fp8Pages:
    """Views of one layer's cache in the layout `PagedFp8Heads`.

    k, v                      float8_e4m3fn [num_blocks, block_size, h, d]
    k_exponents, v_exponents  uint8 [num_blocks, h, block_size]
    """

    def __init__(self, cache: torch.Tensor, spec: AttentionSpec, block_size: int):
        layout = PagedFp8Heads.of(spec)
        num_heads, head_dim = spec.num_kv_heads, spec.head_dim
        num_blocks, rest = divmod(cache.numel(), layout.block_bytes(block_size, 1))
        assert cache.dtype == torch.uint8 and not rest, (cache.dtype, cache.shape)
        num_values = 2 * num_blocks * block_size * num_heads * head_dim
        values = cache[:num_values].view(torch.float8_e4m3fn)
        self.k, self.v = values.view(2, num_blocks, block_size, num_heads, head_dim).unbind(0)
        exponents = cache[num_values:].view(2, num_blocks, num_heads, block_size)
        self.k_exponents, self.v_exponents = exponents.unbind(0)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """K, V and their exponents, in the order of Triton's kernels."""
        return self.k, self.v, self.k_exponents, self.v_exponents


def round_heads(x_Thd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8_e4m3fn [T, h, d] and the exponents, uint8 [T, h]."""
    x_f32 = x_Thd.float()
    largest_Th = x_f32.abs().amax(-1).contiguous().view(torch.int32)
    exponents_Th = (largest_Th >> MANTISSA_BITS) - BELOW_TOP
    exponents_Th = exponents_Th.clamp_(MIN_EXPONENT, MAX_EXPONENT)
    inverse_Th1 = power_of_two(ONE_SIDE - exponents_Th).unsqueeze(-1)
    return (x_f32 * inverse_Th1).to(torch.float8_e4m3fn), exponents_Th.to(torch.uint8)


def widen(
    values: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return values [..., d] of exponents [...] in `dtype`."""
    return (values.float() * power_of_two(exponents.int()).unsqueeze(-1)).to(dtype)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return float32 of biased exponents in int32."""
    return (exponents << MANTISSA_BITS).view(torch.float32)
