"""The latents (MLA) of one layer as torch's operators read and write them, in the model's dtype or in e4m3.

T tokens, L keys, C values of a latent, r of a rotated key, W = C + r.
"""

import torch

from kernels.attention.fp8_latents import Fp8Latents
from kernels.attention.fp8_pages import round_heads, widen
from kernels.interface.attention_spec import AttentionSpec


class LatentCache:
    """One layer's sizes, and flat views of its cache: whole blocks for reading, slots for writing."""

    def __init__(self, spec: AttentionSpec, kv_cache: torch.Tensor):
        assert spec.mla is not None
        self.dims, self.scale, self.num_heads = spec.mla, spec.scale, spec.num_heads
        num_blocks, block_size, width = kv_cache.shape
        self._blocks = kv_cache.view(num_blocks, block_size * width)
        self._slots = kv_cache.view(num_blocks * block_size, width)

    def store(self, latent_TW: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Write the new latents to their slots; return them as a reader of the cache finds them."""
        self._slots.index_copy_(0, slots, latent_TW)
        return latent_TW

    def read(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the latents [L, W] of all tokens of these blocks, a copy in the model's dtype; blocks: int64 [any]."""
        return self._blocks.index_select(0, blocks).view(-1, self.dims.width)

    def keys_and_values(
        self, blocks: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents of whole blocks as the one head of K, [L, 1, W], and of V, [L, 1, C]."""
        latents_L1W = self.read(blocks, dtype).unsqueeze(1)
        return latents_L1W, latents_L1W[..., : self.dims.rank]


class Fp8LatentCache(LatentCache):
    """The same over a cache in e4m3."""

    def __init__(self, spec: AttentionSpec, kv_cache: torch.Tensor, block_size: int):
        assert spec.mla is not None
        self.dims, self.scale, self.num_heads = spec.mla, spec.scale, spec.num_heads
        latents = Fp8Latents(kv_cache, spec.mla, block_size)
        # As bytes, because few operators take e4m3.
        self._parts = latents.values.view(torch.uint8), latents.keys, latents.exponents

    def store(self, latent_TW: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        rank = self.dims.rank
        new_T1C, new_T1 = round_heads(latent_TW[:, None, :rank])
        keys_Tr = latent_TW[:, rank:].to(torch.bfloat16)
        stored = new_T1C[:, 0].view(torch.uint8), keys_Tr, new_T1[:, 0]
        for cached, of_tokens in zip(self._parts, stored, strict=True):
            cached.flatten(0, 1).index_copy_(0, slots, of_tokens)
        return self._widen(new_T1C[:, 0], keys_Tr, new_T1[:, 0], latent_TW.dtype)

    def read(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        values, keys, exponents = (
            cached.index_select(0, blocks).flatten(0, 1) for cached in self._parts
        )
        return self._widen(values.view(torch.float8_e4m3fn), keys, exponents, dtype)

    def _widen(
        self,
        values_TC: torch.Tensor,
        keys_Tr: torch.Tensor,
        exponents_T: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return torch.cat((widen(values_TC, exponents_T, dtype), keys_Tr.to(dtype)), -1)
