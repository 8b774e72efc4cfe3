"""Attention with decodes in C, which reads K and V in the cache's blocks without a copy. float32 on CPU.

B sequences, H query heads, h KV heads, d head dim.
"""

from collections.abc import Sequence
from functools import partial

import torch

from kernels.attention.base import AttentionBatch
from kernels.attention.layer_cache import Cache
from kernels.attention.sdpa import SdpaAttention, SpanPlan
from kernels.attention.shared_prefixes import SharingCost
from kernels.attention.shared_rows import SharedGroup, merge_groups, shared_groups
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.native.library import load, native_unavailable, native_unsupported_reason


class NativeAttention(SdpaAttention):
    """Prompts as in `sdpa`; decodes read the blocks in place: 64 us for 8 decodes of 100 tokens, `sdpa` 150 us."""

    name = "native"
    devices = ("cpu",)
    auto = "compiled C reads the pages of decodes where they lie"
    fp8_cache = False
    shares_sinks = True
    # Decodes in C compute as fast as products of matrices, so that only what exceeds the processor's cache is saved: of
    # 32 decodes, 8 to 32 query heads, those that share 1024 tokens gain nothing, those that share 4096 up to twice.
    sharing_cost = SharingCost(group_tokens=512, saved_tokens=2**16)

    def __init__(self, specs: Sequence[AttentionSpec], block_size: int):
        super().__init__(specs, block_size)
        self._paged_decode, self._store_kv = load().paged_decode, load().store_kv
        self._max_group_size = max((spec.group_size for spec in specs), default=1)
        self._scratch = torch.empty(0)
        self._groups: list[SharedGroup] = []
        self._shared_tokens: torch.Tensor | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return native_unavailable()

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        reason = native_unsupported_reason(shape.dtype_name)
        return reason or super().unsupported_reason(shape)

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self._table = batch.block_table
        self._lens = torch.from_numpy(batch.seq_lens_cpu)
        group_size = self._max_group_size
        longest = int(batch.seq_lens_cpu[: batch.num_single_rows].max(initial=0))
        if self._scratch.numel() < group_size * longest:
            self._scratch = torch.empty(2 * group_size * longest)

    def _plan_decodes(self, batch: AttentionBatch) -> None:
        """Plan the shared keys alone: decodes read the block table itself."""
        shared = self.take_shared(batch)
        self._groups, self._shared_tokens = [], None
        if shared is not None:
            self._groups = shared_groups(shared, batch.block_table, self.block_size)
            tokens = shared.tokens_of_rows(batch.num_single_rows)
            self._shared_tokens = torch.from_numpy(tokens)

    def _store(
        self, k_Thd: torch.Tensor, v_Thd: torch.Tensor, cache: Cache, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spec = cache.spec
        for x_Thd in (k_Thd, v_Thd):
            assert x_Thd.dtype == torch.float32 and x_Thd.stride()[1:] == (spec.head_dim, 1)
        self._store_kv(
            k_Thd.data_ptr(),
            k_Thd.stride(0),
            v_Thd.data_ptr(),
            v_Thd.stride(0),
            slots.data_ptr(),
            k_Thd.shape[0],
            spec.num_kv_heads * spec.head_dim,
            cache.k_slots.data_ptr(),
            cache.v_slots.data_ptr(),
        )
        return k_Thd, v_Thd

    def _attend_spans(
        self,
        q_THd: torch.Tensor,
        cache: Cache,
        plan: SpanPlan,
        sinks_H: torch.Tensor | None,
        out_THd: torch.Tensor,
        first: int = 0,
    ) -> None:
        count = self._num_decodes
        if count:
            self._decode_paged(q_THd[:count], cache, out_THd[:count], plan.table, sinks_H)
        super()._attend_spans(q_THd, cache, plan, sinks_H, out_THd, first=count)

    def _decode_batch(self, q_BHd: torch.Tensor, cache: Cache, out_BHd: torch.Tensor) -> None:
        self._decode_paged(q_BHd, cache, out_BHd, self._table, None)

    def _decode_paged(
        self,
        q_BHd: torch.Tensor,
        cache: Cache,
        out_BHd: torch.Tensor,
        table: torch.Tensor,
        sinks_H: torch.Tensor | None,
    ) -> None:
        spec = cache.spec
        shared = self._shared_tokens if spec.window is None else None
        lse_BH = None if shared is None else q_BHd.new_empty(q_BHd.shape[:2])
        assert q_BHd.dtype == torch.float32 and self._lens.dtype == torch.int32
        if q_BHd.stride()[1:] != (spec.head_dim, 1):
            q_BHd = q_BHd.contiguous()
        self._paged_decode(
            q_BHd.data_ptr(),
            q_BHd.stride(0),
            cache.k_slots.data_ptr(),
            cache.v_slots.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            self._lens.data_ptr(),
            q_BHd.shape[0],
            spec.num_kv_heads,
            spec.group_size,
            spec.head_dim,
            self.block_size,
            spec.window or 0,
            spec.scale,
            None if sinks_H is None else sinks_H.data_ptr(),
            None if shared is None else shared.data_ptr(),
            out_BHd.data_ptr(),
            None if lse_BH is None else lse_BH.data_ptr(),
            self._scratch.data_ptr(),
        )
        if lse_BH is not None:
            read = partial(cache.read, dtype=q_BHd.dtype)
            merge_groups(self._groups, q_BHd, read, spec.scale, out_BHd, lse_BH)
