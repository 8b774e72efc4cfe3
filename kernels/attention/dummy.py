"""Attention of zeros: replaces attention while its kernels compile, so that all other kernels can compile.

T tokens, H query heads, h KV heads, M = H + 2h, N = H + h, d head dim, r rotated values of a head.
"""

import torch

from kernels.attention.base import Attention, AttentionBatch
from kernels.attention.fp8_latents import latent_parts
from kernels.attention.fp8_pages import Fp8Pages
from kernels.attention.latent_up import LatentHeads


class DummyAttention(Attention):
    """Returns zeros and writes no K and V, but launches the kernels beside attention that `replaced` launches.

    Caches of one block are enough for `bind`.
    """

    name = "dummy"

    def __init__(self, replaced: Attention):
        super().__init__(replaced.specs, replaced.block_size)
        self.fused_store, self.mla = replaced.fused_store, replaced.mla

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare one slot of -1, so that `store` writes nothing."""
        self._slots = batch.slot_mapping.new_full((1,), -1)

    def __call__(
        self,
        q_THd: torch.Tensor,
        k_Thd: torch.Tensor,
        v_Thd: torch.Tensor,
        layer: int,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return q_THd.new_zeros(q_THd.shape)

    def store(
        self,
        qkv_TMd: torch.Tensor,
        layer: int,
        rotation_T1r: torch.Tensor | None = None,
        norm_Nd: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        from kernels.triton.qk_rope import norm_rotate_store

        spec, cache = self.specs[layer], self.kv_caches[layer]
        caches = Fp8Pages(cache, spec, self.block_size).tensors if spec.fp8_cache else cache
        norm_rotate_store(qkv_TMd, norm_Nd, eps, rotation_T1r, self._slots, *caches)

    def attend(
        self, qkv_TMd: torch.Tensor, layer: int, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        spec = self.specs[layer]
        return qkv_TMd.new_zeros(len(qkv_TMd), spec.num_heads, spec.head_dim)

    def store_latents(
        self,
        q_THd: torch.Tensor,
        latent_TW: torch.Tensor,
        layer: int,
        rotation_T1r: torch.Tensor,
        norm_C: torch.Tensor,
        eps: float,
    ) -> None:
        from kernels.triton.store_latents import store_latents

        parts = latent_parts(self.kv_caches[layer], self.specs[layer], self.block_size)
        store_latents(q_THd, latent_TW, norm_C, eps, rotation_T1r, self._slots, *parts)

    def attend_latent(
        self, q_THd: torch.Tensor, latent_TW: torch.Tensor, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        latent = self.specs[layer].mla
        assert latent is not None
        return q_THd.new_zeros(*q_THd.shape[:2], latent.value_dim)
