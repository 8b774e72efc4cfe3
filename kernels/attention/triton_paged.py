"""Attention with sinks and sliding windows by our Triton kernel, which reads the pages where they lie.

For models that flashinfer's wrappers here do not serve. Steps are not captured in CUDA graphs. Knows nothing of
scheduling.

T tokens, H query heads, h KV heads, d head dim, B sequences.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.attention.base import Attention, AttentionBatch
from kernels.attention.spec import AttentionSpec
from kernels.backends.backend import BackendShape
from kernels.host.capability import too_old_gpu
from kernels.host.triton_version import triton_unavailable
from kernels.pending import wait_previous_ubatch


class TritonPagedAttention(Attention):
    """One launch for decodes and one for prompts, each layer."""

    name = "triton"
    devices = ("cuda",)
    auto = "our kernel serves sinks and sliding windows"
    windows = sinks = True
    distributions = ("triton",)

    def __init__(self, specs: Sequence[AttentionSpec], block_size: int):
        super().__init__(specs, block_size)
        from kernels.triton import paged_attention
        from kernels.triton.paged import store_kv

        self._kernel, self._store_kv = paged_attention, store_kv
        self._windows = tuple(dict.fromkeys(spec.window for spec in specs))
        groups = {spec.group_size for spec in specs}
        assert len(groups) <= 1, f"layers have groups of {sorted(groups)} heads"
        self._group = max(groups, default=1)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return triton_unavailable() or too_old_gpu(device, (8, 0))

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if reason := super().unsupported_reason(shape):
            return reason
        if len({spec.group_size for spec in shape.attention_specs}) > 1:
            return "it takes layers with equal groups of query heads"
        return None

    @classmethod
    def auto_reason(cls, shape: BackendShape) -> str | None:
        """See Backend. Where there are neither sinks nor windows, other backends are faster."""
        special = any(spec.sinks or spec.window is not None for spec in shape.attention_specs)
        return super().auto_reason(shape) if special else None

    def plan(self, batch: AttentionBatch) -> None:
        device = batch.block_table.device
        starts, lens = batch.query_start_loc_cpu, batch.seq_lens_cpu
        decodes, new = batch.num_decodes, np.diff(starts)
        self._tokens = [self._kernel.tile_tokens(self._group, prompts=p) for p in (False, True)]
        per_tile = self._tokens[1]
        counts = -(-new[decodes:] // per_tile)
        prompt_seqs = np.repeat(np.arange(decodes, batch.num_seqs), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        firsts = (np.arange(len(prompt_seqs)) - before) * per_tile
        parts = (np.arange(decodes), np.zeros(decodes), prompt_seqs, firsts, starts, lens)
        packed = np.concatenate(parts).astype(np.int32)  # one copy to the device
        cuts = torch.from_numpy(packed).to(device).split_with_sizes([len(part) for part in parts])
        self._tiles = [(cuts[0], cuts[1]), (cuts[2], cuts[3])]
        self._starts, self._lens = cuts[4], cuts[5]
        self._num_tokens = batch.num_tokens
        self._blocks = {window: batch.blocks_of(window) for window in self._windows}

    def __call__(
        self,
        q_THd: torch.Tensor,
        k_Thd: torch.Tensor,
        v_Thd: torch.Tensor,
        layer: int,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        spec = self.specs[layer]
        k_cache, v_cache = self.kv_caches[layer].unbind(0)
        table, slots = self._blocks[spec.window]
        self._store_kv(k_Thd, v_Thd, slots[: self._num_tokens], k_cache, v_cache)
        wait_previous_ubatch()
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        out_THd[self._num_tokens :] = 0
        for tiles, tokens in zip(self._tiles, self._tokens, strict=True):
            self._kernel.paged_attention(
                *(q_THd, k_cache, v_cache, out_THd, table, tiles, self._starts, self._lens),
                tokens=tokens,
                scale=spec.scale,
                window=spec.window,
                sinks_H=sinks_H,
            )
        return out_THd
