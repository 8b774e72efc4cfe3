"""Attention by gathering pages and calling `scaled_dot_product_attention`: runs everywhere.

The CPU's backend and the reference of all backends. Layers with sinks or a window go to `spans`.
The G = H / h query heads that share a KV head become query rows of that head, so grouped-query attention copies
nothing. Knows nothing of scheduling.

T tokens, H query heads, h KV heads, G = H / h, d head dim, B sequences, L keys, M query rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from kernels.attention.base import Attention, AttentionBatch
from kernels.attention.layer_cache import Cache, Fp8Cache
from kernels.attention.shared_prefixes import SharedPrefixes
from kernels.attention.shared_rows import OwnKeys, SharedRows, decode_shared, shared_groups
from kernels.attention.spans import attend_span
from kernels.interface.attention_spec import AttentionSpec
from kernels.pending import wait_previous_ubatch

# Query rows of one call: bounds the mask and skips most of the keys above the diagonal.
QUERY_CHUNK = 512
# Padded keys that cost as much as one more call (60 us for 1024 keys on a CPU core).
CALL_COST = 512
# Query rows of a block in CUDA's memory-efficient kernel (64, for some shapes 32). Where heads share their keys, the
# kernel reads the mask wrongly for a last block of one row (torch 2.11, pytorch/pytorch#191937): 65 rows become 66.
CUDA_QUERY_BLOCK = 32


@dataclass(frozen=True)
class DecodeGroup:
    """Decodes of similar length. `rows` are their rows of the batch; None: all decodes, in order.

    blocks   int64 [B * max_blocks]
    hidden   int64, the gathered tokens that the mask hides
    """

    rows: torch.Tensor | None
    blocks: torch.Tensor
    mask_B11L: torch.Tensor | None
    hidden: torch.Tensor | None

    def clear_hidden(self, *gathered: torch.Tensor) -> None:
        """Zero the hidden tokens of tensors [B * L, ..]: what a request left there may be NaN, which no mask hides."""
        if self.hidden is not None:
            for tokens in gathered:
                tokens.index_fill_(0, self.hidden, 0)


@dataclass(frozen=True)
class Extend:
    """Rows `start` to `end` of one sequence, behind `context` tokens in `blocks` (None: no earlier tokens)."""

    start: int
    end: int
    context: int
    blocks: torch.Tensor | None


@dataclass(frozen=True)
class SpanPlan:
    """Layers with sinks or with a window: their slots and block table; a span for each sequence.

    The blocks of a span begin with the first block that holds a key of its first row's window; `context` is counted
    from there.
    """

    slots: torch.Tensor
    table: torch.Tensor
    spans: list[Extend]


class SdpaAttention(Attention):
    """Decodes in groups of similar length, prompts one by one."""

    name = "sdpa"
    auto = "gathers pages for torch's own attention, runs everywhere"
    windows = sinks = fp8_cache = cascades = True
    # Whether layers with sinks share keys too.
    shares_sinks = False

    def __init__(self, specs: Sequence[AttentionSpec], block_size: int):
        super().__init__(specs, block_size)
        self._caches: list[Cache] = []
        self._num_tokens = 0
        self._num_decodes = 0
        self._decodes: list[DecodeGroup] = []
        self._shared: SharedRows | None = None
        self._extends: list[Extend] = []
        self._causal: torch.Tensor | None = None
        odd = [spec.window for spec in specs if spec.sinks or spec.window is not None]
        self._windows = tuple(dict.fromkeys(odd))
        self._span_plans: dict[int | None, SpanPlan] = {}

    @classmethod
    def cascade_refusal(cls, specs: Iterable[AttentionSpec]) -> str | None:
        specs = tuple(specs)
        if all(spec.sinks or spec.window is not None for spec in specs) and not cls.shares_sinks:
            return f"{cls.name} computes layers with sinks sequence by sequence"
        return super().cascade_refusal(specs)

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        super().bind(kv_caches)
        self._caches = [
            Fp8Cache(spec, kv_cache, self.block_size) if spec.fp8_cache else Cache(spec, kv_cache)
            for spec, kv_cache in zip(self.specs, kv_caches, strict=False)
        ]

    @property
    def _mask_dtype(self) -> torch.dtype:
        """The dtype of the cached values, because CUDA's kernels read a mask of another dtype wrongly."""
        found = self.kv_caches[0].dtype if self.kv_caches else torch.float32
        return found if found.is_floating_point else torch.float32  # caches in e4m3 are bytes

    def plan(self, batch: AttentionBatch) -> None:
        if not self.specs:  # of a model with linear attention alone
            return
        first = self._decoding(batch)
        self._num_tokens = batch.num_tokens
        self._num_decodes = int(batch.query_start_loc_cpu[first])
        self._span_plans = {window: self._plan_spans(batch, window) for window in self._windows}
        self._slot_mapping = batch.slot_mapping[: batch.num_tokens]
        self._plan_decodes(batch)
        self._extends = []
        starts, lens = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu.tolist()
        for seq in range(first, batch.num_seqs):
            start, end = starts[seq], starts[seq + 1]
            context = lens[seq] - (end - start)
            num_blocks = -(-lens[seq] // self.block_size)
            blocks = batch.block_table[seq, :num_blocks] if context else None
            self._extends.append(Extend(start, end, context, blocks))
            if context or end - start > QUERY_CHUNK:
                self._reserve_causal(lens[seq])

    def _decoding(self, batch: AttentionBatch) -> int:
        """Return how many sequences, the first ones, are computed as decodes."""
        return batch.num_single_rows

    def _plan_spans(self, batch: AttentionBatch, window: int | None) -> SpanPlan:
        table, slots = batch.blocks_of(window)
        spans, starts = [], batch.query_start_loc_cpu.tolist()
        for seq, length in enumerate(batch.seq_lens_cpu.tolist()):
            start, end = starts[seq], starts[seq + 1]
            context = length - (end - start)
            first = 0 if window is None else max(0, context + 1 - window) // self.block_size
            blocks = table[seq, first : -(-length // self.block_size)]
            spans.append(Extend(start, end, context - first * self.block_size, blocks))
        return SpanPlan(slots[: batch.num_tokens], table, spans)

    def __call__(
        self,
        q_THd: torch.Tensor,
        k_Thd: torch.Tensor,
        v_Thd: torch.Tensor,
        layer: int,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_rows, num_tokens = q_THd.shape[0], self._num_tokens
        cache = self._caches[layer]
        special = cache.spec.sinks or cache.spec.window is not None
        plan = self._span_plans[cache.spec.window] if special else None
        if num_rows > num_tokens:
            k_Thd, v_Thd = k_Thd[:num_tokens], v_Thd[:num_tokens]
        slots = self._slot_mapping if plan is None else plan.slots
        k_Thd, v_Thd = self._store(k_Thd, v_Thd, cache, slots)
        wait_previous_ubatch()
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        if num_rows > num_tokens:
            out_THd[num_tokens:] = 0
        if plan is not None:
            self._attend_spans(q_THd, cache, plan, sinks_H, out_THd)
            return out_THd
        if self._num_decodes:
            decodes = slice(0, self._num_decodes)
            self._decode_batch(q_THd[decodes], cache, out_THd[decodes])
        for extend in self._extends:
            self._extend(q_THd, k_Thd, v_Thd, cache, extend, out_THd)
        return out_THd

    def _store(
        self, k_Thd: torch.Tensor, v_Thd: torch.Tensor, cache: Cache, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new K and V to their slots; return them as a reader of the cache finds them."""
        return cache.store(k_Thd, v_Thd, slots)

    def _attend_spans(
        self,
        q_THd: torch.Tensor,
        cache: Cache,
        plan: SpanPlan,
        sinks_H: torch.Tensor | None,
        out_THd: torch.Tensor,
        first: int = 0,
    ) -> None:
        """Write the attention of the sequences from `first` on to out_THd."""
        for span in plan.spans[first:]:
            assert span.blocks is not None
            num_keys = span.context + span.end - span.start
            k_Lhd, v_Lhd = cache.read(span.blocks, q_THd.dtype)
            rows = slice(span.start, span.end)
            out_THd[rows] = attend_span(
                q_THd[rows], k_Lhd[:num_keys], v_Lhd[:num_keys], cache.spec, sinks_H
            )

    def _plan_decodes(self, batch: AttentionBatch) -> None:
        seq_lens = batch.seq_lens_cpu[: batch.num_single_rows]
        num_blocks = -(-seq_lens // self.block_size)
        shared = self.take_shared(batch)
        alone = (
            None if shared is None else np.flatnonzero(shared.tokens_of_rows(len(seq_lens)) == 0)
        )
        self._shared = None if shared is None else self._plan_shared(batch, shared)
        groups = length_groups(num_blocks if alone is None else num_blocks[alone], self.block_size)
        self._decodes = [
            self._plan_group(batch, seq_lens, num_blocks, _of(alone, members)) for members in groups
        ]

    def _plan_shared(self, batch: AttentionBatch, shared: SharedPrefixes) -> SharedRows:
        """Plan the decodes with shared keys; their own keys are padded to those of the longest of a group."""
        table, rows = batch.block_table, shared.rows.astype(np.int64)
        first = shared.tokens_of_rows(batch.num_single_rows)[rows] // self.block_size
        lens = batch.seq_lens_cpu[rows] - first * self.block_size
        own = []
        for members in length_groups(-(-lens // self.block_size), self.block_size):
            chosen = np.arange(len(rows)) if members is None else members
            width = -(-int(lens[chosen].max()) // self.block_size)
            columns = np.minimum(first[chosen, None] + np.arange(width), table.shape[1] - 1)
            where = torch.from_numpy(rows[chosen]).to(table.device)
            blocks = table[where[:, None], torch.from_numpy(columns).to(table.device)]
            own.append(OwnKeys(where, blocks, torch.from_numpy(lens[chosen]).to(table.device)))
        return SharedRows(shared_groups(shared, table, self.block_size), own)

    def _decode_batch(self, q_BHd: torch.Tensor, cache: Cache, out_BHd: torch.Tensor) -> None:
        """Write the attention of the planned decodes to out_BHd."""
        for group in self._decodes:
            if group.rows is None:
                out_BHd.copy_(self._decode(q_BHd, cache, group))
            else:
                found_BHd = self._decode(q_BHd.index_select(0, group.rows), cache, group)
                out_BHd.index_copy_(0, group.rows, found_BHd)
        if self._shared is not None:
            read = partial(cache.read, dtype=q_BHd.dtype)
            decode_shared(self._shared, q_BHd, read, cache.spec.scale, out_BHd)

    def _plan_group(
        self,
        batch: AttentionBatch,
        seq_lens: np.ndarray,
        num_blocks: np.ndarray,
        members: np.ndarray | None,
    ) -> DecodeGroup:
        if members is None:
            rows, table = None, batch.block_table[: batch.num_single_rows]
        else:
            rows = torch.from_numpy(members).to(batch.block_table.device)
            seq_lens, num_blocks = seq_lens[members], num_blocks[members]
            table = batch.block_table.index_select(0, rows)
        width = int(num_blocks.max())
        num_keys = width * self.block_size
        mask_B11L = hidden = None
        if (seq_lens < num_keys).any():
            hidden_BL = np.arange(num_keys) >= seq_lens[:, None]
            mask_BL = np.where(hidden_BL, np.float32("-inf"), np.float32(0))
            mask_B11L = torch.from_numpy(mask_BL)[:, None, None, :]
            mask_B11L = mask_B11L.to(table.device, self._mask_dtype)
            hidden = torch.from_numpy(np.flatnonzero(hidden_BL)).to(table.device)
        return DecodeGroup(rows, table[:, :width].reshape(-1), mask_B11L, hidden)

    def _decode(self, q_BHd: torch.Tensor, cache: Cache, group: DecodeGroup) -> torch.Tensor:
        spec, batch_size = cache.spec, q_BHd.shape[0]
        paged = (batch_size, -1, spec.num_kv_heads, spec.head_dim)
        k_Lhd, v_Lhd = cache.read(group.blocks, q_BHd.dtype)
        group.clear_hidden(k_Lhd, v_Lhd)
        k_BLhd, v_BLhd = k_Lhd.view(paged), v_Lhd.view(paged)
        mask_B11L = None if group.mask_B11L is None else group.mask_B11L.to(q_BHd.dtype)
        out_BhGd = F.scaled_dot_product_attention(
            q_BHd.reshape(batch_size, spec.num_kv_heads, -1, spec.head_dim),
            k_BLhd.transpose(1, 2),
            v_BLhd.transpose(1, 2),
            attn_mask=mask_B11L,
            scale=spec.scale,
        )
        return out_BhGd.reshape(q_BHd.shape)

    def _extend(
        self,
        q_THd: torch.Tensor,
        k_Thd: torch.Tensor,
        v_Thd: torch.Tensor,
        cache: Cache,
        extend: Extend,
        out_THd: torch.Tensor,
    ) -> None:
        spec = cache.spec
        if extend.blocks is None:
            k_Lhd, v_Lhd = k_Thd[extend.start : extend.end], v_Thd[extend.start : extend.end]
        else:
            k_Lhd, v_Lhd = cache.read(extend.blocks, q_THd.dtype)
        group = spec.group_size
        for start in range(extend.start, extend.end, QUERY_CHUNK):
            end = min(start + QUERY_CHUNK, extend.end)
            offset = extend.context + start - extend.start
            num_keys = offset + end - start
            heads = (spec.num_kv_heads, group, num_keys, spec.head_dim)
            q_MHd = q_THd[start:end]
            if offset and q_MHd.is_cuda and (end - start) % CUDA_QUERY_BLOCK == 1:
                q_MHd = F.pad(q_MHd, (0, 0, 0, 0, 0, 1))
            q_hGMd = q_MHd.view(len(q_MHd), -1, group, spec.head_dim).permute(1, 2, 0, 3)
            out_hGMd = F.scaled_dot_product_attention(
                q_hGMd,
                k_Lhd[:num_keys].transpose(0, 1).unsqueeze(1).expand(heads),
                v_Lhd[:num_keys].transpose(0, 1).unsqueeze(1).expand(heads),
                attn_mask=self._causal_mask(offset, q_MHd, num_keys) if offset else None,
                is_causal=not offset,
                scale=spec.scale,
            )
            out_THd[start:end] = out_hGMd.permute(2, 0, 1, 3).flatten(1, 2)[: end - start]

    def _reserve_causal(self, num_keys: int) -> None:
        """Make one causal mask for all offsets: row i shows keys up to `i + W`, W = columns - QUERY_CHUNK."""
        columns = 0 if self._causal is None else self._causal.shape[1]
        if columns < num_keys + QUERY_CHUNK:
            columns = (1 << (num_keys - 1).bit_length()) + QUERY_CHUNK
            hidden = torch.full((QUERY_CHUNK, columns), float("-inf"))
            hidden = hidden.triu_(columns - QUERY_CHUNK + 1)
            self._causal = hidden.to(self.kv_caches[0].device, self._mask_dtype)

    def _causal_mask(self, offset: int, q_MHd: torch.Tensor, num_keys: int) -> torch.Tensor:
        """Return the part [M, num_keys] of the mask in which row i shows keys up to `offset + i`, in q's dtype."""
        assert self._causal is not None
        first = self._causal.shape[1] - QUERY_CHUNK - offset
        mask = self._causal[: len(q_MHd), first : first + num_keys].to(q_MHd.dtype)
        # CUDA kernels fault on a mask that does not start at an aligned address.
        return mask.clone(memory_format=torch.contiguous_format) if mask.is_cuda else mask


def _of(rows: np.ndarray | None, members: np.ndarray | None) -> np.ndarray | None:
    """Return these members of `rows`; None as either: all, in order."""
    if rows is None or members is None:
        return rows if members is None else members
    chosen: np.ndarray = rows[members]
    return chosen


def length_groups(num_blocks: np.ndarray, block_size: int) -> list[np.ndarray | None]:
    """Group decodes by length where padding short decodes to the longest costs more than a further call.

    num_blocks is int [B], the blocks of each decode. Return int64 index arrays, or [None] for one group of all.
    """
    if not len(num_blocks):
        return []
    waste = int(num_blocks.max()) * len(num_blocks) - int(num_blocks.sum())
    if waste * block_size <= 2 * CALL_COST:
        return [None]
    order = np.argsort(num_blocks, kind="stable")
    groups, start, wasted = [], 0, 0
    for i in range(1, len(order)):
        # Keys that pad the group so far to the length of decode i; cut here when they cost more than a call.
        wasted += int(num_blocks[order[i]] - num_blocks[order[i - 1]]) * (i - start)
        if wasted * block_size > CALL_COST:
            groups.append(order[start:i])
            start, wasted = i, 0
    groups.append(order[start:])
    return [np.sort(group) for group in groups] if len(groups) > 1 else [None]
