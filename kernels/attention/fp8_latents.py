"""Latents (MLA) in e4m3 with a scale for each token: the views of a cache.

A scale is a power of two, as for heads of K and V (kernels/attention/fp8_pages.py). One scale serves a whole latent,
because e4m3 has exponents of its own: finer scales keep more of the values below 2^-14 of the largest, and no others.
The rotated key stays in bfloat16: it is a ninth of the values, and scores depend on it through large angles.
"""

from collections.abc import Sequence

import torch

from kernels.interface.attention_spec import AttentionSpec, MlaDims
from kernels.interface.kv_layout import PagedFp8Latents


class Fp8Latents:
    """Views of one layer's cache in the layout `PagedFp8Latents`.

    values     float8_e4m3fn [num_blocks, block_size, rank]
    keys       bfloat16 [num_blocks, block_size, rope_dim], rotated
    exponents  uint8 [num_blocks, block_size], biased as those of float32
    """

    def __init__(self, cache: torch.Tensor, dims: MlaDims, block_size: int):
        layout = PagedFp8Latents.of(dims)
        num_blocks, rest = divmod(cache.numel(), layout.block_bytes(block_size, 1))
        assert cache.dtype == torch.uint8 and not rest, (cache.dtype, cache.shape)
        tokens = num_blocks * block_size
        parts = [2 * tokens * dims.rope_dim, tokens * dims.rank, tokens]
        keys, values, exponents = cache.split_with_sizes(parts)
        self.keys = keys.view(torch.bfloat16).view(num_blocks, block_size, dims.rope_dim)
        self.values = values.view(torch.float8_e4m3fn).view(num_blocks, block_size, dims.rank)
        self.exponents = exponents.view(num_blocks, block_size)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Values, keys and exponents, in the order of Triton's kernels."""
        return self.values, self.keys, self.exponents


def latent_parts(
    cache: torch.Tensor, spec: AttentionSpec, block_size: int
) -> tuple[torch.Tensor, ...]:
    """Return views of one layer's cache in the order of Triton's kernels: latents, rotated keys, in e4m3 exponents."""
    dims = spec.mla
    assert dims is not None
    if spec.fp8_cache:
        return tuple(Fp8Latents(cache, dims, block_size).tensors)
    return cache[..., : dims.rank], cache[..., dims.rank :]
