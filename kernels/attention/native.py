"""Attention in C of decodes, with drafts or without, which reads K and V in the blocks of the cache. float32 on CPU.

B sequences, H query heads, h KV heads, d head dim.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
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

    def _decoding(self, batch: AttentionBatch) -> int:
        return batch.num_decodes

    def _plan_decodes(self, batch: AttentionBatch) -> None:
        """Find the length and the blocks of each row: a row with a draft is a decode behind the rows before it."""
        self._first_span = count = self._decoding(batch)
        starts, lens = batch.query_start_loc_cpu[: count + 1], batch.seq_lens_cpu[:count]
        self._seq_of_row: torch.Tensor | None = None
        if batch.num_verify:
            seqs = np.repeat(np.arange(count), np.diff(starts))
            rows = np.arange(len(seqs), dtype=np.int32)
            lens = lens[seqs] - (starts[1:][seqs] - 1 - rows)
            self._seq_of_row = torch.from_numpy(seqs)
        self._lens = torch.from_numpy(lens)
        self._table = self._of_rows(batch.block_table)
        self._window_tables = {
            window: self._of_rows(plan.table) for window, plan in self._span_plans.items()
        }
        size = self._max_group_size * int(lens.max(initial=0))
        if self._scratch.numel() < size:
            self._scratch = torch.empty(2 * size)
        shared = self.take_shared(batch)
        self._groups, self._shared_tokens = [], None
        if shared is not None:
            self._groups = shared_groups(shared, batch.block_table, self.block_size)
            self._shared_tokens = torch.from_numpy(shared.tokens_of_rows(len(lens)))

    def _of_rows(self, table: torch.Tensor) -> torch.Tensor:
        """Return the entry of each decoding row in a block table of sequences."""
        return table if self._seq_of_row is None else table.index_select(0, self._seq_of_row)

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
            table = self._window_tables[cache.spec.window]
            self._decode_paged(q_THd[:count], cache, out_THd[:count], table, sinks_H)
        super()._attend_spans(q_THd, cache, plan, sinks_H, out_THd, first=self._first_span)

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
