"""Takes the place of attention whose kernels are still being compiled, so that all others can be compiled meanwhile.

T tokens, H query heads, h KV heads, N = H + h, d head dim.
"""

import torch

from kernels.attention.base import Attention, AttentionBatch


class DummyAttention(Attention):
    """Answers with zeros and writes no K and V, but launches the other kernels that the replaced attention does.

    One block of caches is enough to bind it to.
    """

    name = "stand-in"

    def __init__(self, replaced: Attention):
        super().__init__(replaced.spec)
        self.fuses_qk_norm = replaced.fuses_qk_norm

    def plan(self, batch: AttentionBatch) -> None:
        """Nothing depends on the batch but where K and V would go."""
        self._slots = batch.slot_mapping.new_full((1,), -1)

    def __call__(
        self, q_THd: torch.Tensor, k_Thd: torch.Tensor, v_Thd: torch.Tensor, layer: int
    ) -> torch.Tensor:
        return q_THd.new_zeros(q_THd.shape)

    def norm_rotate_store(
        self,
        qkv_TMd: torch.Tensor,
        weight_Nd: torch.Tensor,
        eps: float,
        rotation_T1d: torch.Tensor,
        layer: int,
    ) -> None:
        from kernels.triton.qk_rope import norm_rotate_store

        caches = self.kv_caches[layer]
        norm_rotate_store(qkv_TMd, weight_Nd, eps, rotation_T1d, self._slots, *caches)

    def attend(self, qkv_TMd: torch.Tensor, layer: int) -> torch.Tensor:
        return qkv_TMd.new_zeros(len(qkv_TMd), self.spec.num_heads, self.spec.head_dim)
