"""Attention with sinks and sliding windows by our Triton kernels, which read the pages where they lie.

For models that flashinfer's wrappers here do not serve. Decodes are cut into chunks of keys where a GPU would idle
otherwise. Forwards can be captured in CUDA graphs, those with prompts too. Knows nothing of scheduling.

T tokens, H query heads, h KV heads, d head dim, B sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kernels.attention.base import AttentionBatch, GraphAttention, GraphForm
from kernels.attention.decode_chunks import (
    WHOLE_KEYS,
    DecodeChunks,
    cut_rows,
    leaves_whole,
    max_chunks,
    places,
    read_keys,
    whole_rows,
)
from kernels.attention.decode_forms import DecodeForms, multiprocessors
from kernels.attention.fp8_pages import Fp8Pages
from kernels.attention.paged_plans import GraphBuffers, PlannedLayers, PlannedPrompts
from kernels.attention.shared_chunks import TileShape, cut_shared, most_integers, tile_shape
from kernels.attention.shared_prefixes import SharedPrefixes, SharingCost
from kernels.host.capability import too_old_gpu
from kernels.host.hopper import on_hopper
from kernels.host.triton_version import triton_unavailable
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.pending import wait_previous_ubatch


class TritonPagedAttention(GraphAttention):
    """One launch for decodes, or two where they are cut, and one for prompts, each layer."""

    name = "triton"
    devices = ("cuda",)
    auto = "our kernels serve sinks and sliding windows"
    windows = sinks = fp8_cache = mixed_graph = shortens = cascades = True
    distributions: tuple[str, ...] = ("triton",)

    def __init__(self, specs: Sequence[AttentionSpec], block_size: int):
        super().__init__(specs, block_size)
        from kernels.triton import decode_merge, paged_attention, paged_decode
        from kernels.triton.fp8_heads import store_fp8
        from kernels.triton.paged import store_kv

        self._prompt_kernel: Any = paged_attention
        self.decode: Any = paged_decode.paged_decode
        self._chunks_type: Any = decode_merge.Chunks
        self._tiles_type: Any = decode_merge.SharedTiles
        self._store_kv, self._store_fp8 = store_kv, store_fp8
        self._caches: list[tuple[torch.Tensor, ...]] = []
        self._windows = tuple(dict.fromkeys(spec.window for spec in specs))
        self._kv_heads = min((spec.num_kv_heads for spec in specs), default=1)
        groups = {spec.group_size for spec in specs}
        assert len(groups) <= 1, f"layers have groups of {sorted(groups)} heads"
        self._group = max(groups, default=1)
        if specs:
            self.sharing_cost = SharingCost.of_triton(self.kv_layout(specs[0]))
        self._num_decodes = self._num_tokens = self._num_sms = 0
        self.layers: dict[int | None, PlannedLayers] = {}
        self._planned_layers: dict[int | None, PlannedLayers] = {}  # before they were shortened
        self._prompts: PlannedPrompts | None = None
        self._graphs: GraphBuffers | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return triton_unavailable() or too_old_gpu(device, (8, 0))

    @classmethod
    def captures_prompts(cls, *, hopper: bool) -> bool:
        return cls.mixed_graph

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if reason := super().unsupported_reason(shape):
            return reason
        if len({spec.group_size for spec in shape.attention_specs}) > 1:
            return "it takes layers with equal groups of query heads"
        for spec in shape.attention_specs:
            if spec.fp8_cache and spec.head_dim & (spec.head_dim - 1):
                return f"with cache.dtype fp8 it takes a head_dim of a power of two, the model has {spec.head_dim}"
        return None

    @classmethod
    def auto_reason(cls, shape: BackendShape) -> str | None:
        """See Backend. Where there are no sinks, windows and caches in e4m3, other backends are faster."""
        special = any(
            spec.sinks or spec.window is not None or spec.fp8_cache
            for spec in shape.attention_specs
        )
        return super().auto_reason(shape) if special else None

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        super().bind(kv_caches)
        self._graphs = None
        self._caches = [
            tuple(Fp8Pages(cache, spec, self.block_size).tensors)
            if spec.fp8_cache
            else cache.unbind(0)
            for spec, cache in zip(self.specs, kv_caches, strict=False)
        ]
        if kv_caches:
            self._device = kv_caches[0].device
            self._num_sms = multiprocessors(self._device)
            self._forms = DecodeForms(
                self.specs, self.block_size, self._num_sms, fast=on_hopper(self._device)
            )

    def plan(self, batch: AttentionBatch) -> None:
        decodes, shared = batch.num_single_rows, self.take_shared(batch)
        shares = shared is not None
        cuts = shares or not self._whole(batch.seq_lens_cpu[:decodes], decodes)
        lists = self._chunk_lists(batch, decodes, shared, cuts=cuts, shares=shares)
        tiles = None
        if shared is not None:
            tiles = self._tile_shape(decodes)
            lists += cut_shared(shared, decodes, tiles).arrays
        lists += self._prompt_lists(batch)
        packed = np.concatenate(lists).astype(np.int32)  # one copy to the device
        integers = torch.from_numpy(packed).to(self._device, non_blocking=True)
        self._num_decodes, self._num_tokens = decodes, batch.num_tokens
        blocks = {}
        for window in self._windows:
            table, slots = batch.blocks_of(window)
            blocks[window] = table, slots[: batch.num_tokens]
        self._take(integers, lists, cuts, blocks, tiles)

    def _chunk_lists(
        self,
        batch: AttentionBatch,
        num_rows: int,
        shared: SharedPrefixes | None,
        *,
        cuts: bool,
        shares: bool,
    ) -> list[np.ndarray]:
        """The chunks of the decodes for each window, without keys that they share.

        shares   `shared` may be there: the lists are as long in any such plan, which graphs need
        """
        seq_lens = batch.seq_lens_cpu[: batch.num_single_rows]
        tokens = None if shared is None else shared.tokens_of_rows(num_rows)
        most = max_chunks(num_rows, self._forms.programs(num_rows, shares=shares))
        chunks = [
            self._chunks(seq_lens, it, num_rows, tokens, most, cuts=cuts) for it in self._windows
        ]
        return [array for one in chunks for array in one.arrays]

    def _tile_shape(self, num_rows: int) -> TileShape:
        """The tiles of decodes with shared keys. Layers with a window share none: they free old blocks."""
        return tile_shape(num_rows, *self._heads_and_sms)

    @property
    def _heads_and_sms(self) -> tuple[int, int, int]:
        return self._group, self._kv_heads, self._num_sms

    def _prompt_lists(self, batch: AttentionBatch) -> list[np.ndarray]:
        """Sequence and first token of each tile; first row and length of each sequence."""
        first, starts = self._first_in_tiles(batch), batch.query_start_loc_cpu
        per_tile = self._prompt_kernel.tile_tokens(self._group)
        counts = -(-np.diff(starts)[first:] // per_tile)
        seqs = np.repeat(np.arange(first, batch.num_seqs), counts)
        return [seqs, places(counts) * per_tile, starts, batch.seq_lens_cpu]

    def _take(
        self,
        integers: torch.Tensor,
        lists: list[np.ndarray],
        cuts: bool,
        blocks: Mapping[int | None, tuple[torch.Tensor, torch.Tensor]],
        tiles: TileShape | None,
    ) -> None:
        """Read chunks, and tiles if there are, from the copy of `lists` on the device; blocks: tables and slots.

        tiles   of shared keys; None: the lists have none
        """
        found = list(integers.split_with_sizes([len(it) for it in lists]))
        self.layers = {}
        for window in self._windows:
            parts, found = found[:4], found[4:]
            table, slots = blocks[window]
            decoded = self._chunks_type(*parts, table, cut=self._cut(window, cuts))
            self.layers[window] = PlannedLayers(slots, table, decoded)
        if tiles is not None:
            shared, found = self._tiles_type(*found[:7], tile_rows=tiles.decodes), found[7:]
            full = self.layers[None]
            self.layers[None] = replace(full, chunks=replace(full.chunks, shared=shared))
        self._planned_layers = self.layers
        self._prompts = None
        if found:
            seqs, firsts, starts, lens = found
            self._prompts = PlannedPrompts((seqs, firsts), starts, lens)

    def _first_in_tiles(self, batch: AttentionBatch) -> int:
        """Return the first sequence of the tiles; those behind it run in tiles too."""
        return batch.num_single_rows

    def _whole(self, seq_lens: np.ndarray, num_rows: int) -> bool:
        """Return whether no layer's decodes are worth a cut."""
        most = max_chunks(num_rows, self._forms.programs(num_rows, shares=False))
        keys = (read_keys(seq_lens, window) for window in self._windows)
        return all(leaves_whole(of, num_rows, most) for of in keys)

    def _cut(self, window: int | None, cuts: bool) -> bool:
        """Return whether a plan with cuts cuts layers with this window: no more keys than a few tiles are cut."""
        return cuts and (window is None or window > WHOLE_KEYS)

    def _chunks(
        self,
        seq_lens: np.ndarray,
        window: int | None,
        num_rows: int,
        shared: np.ndarray | None,
        most: int,
        *,
        cuts: bool,
    ) -> DecodeChunks:
        if self._cut(window, cuts):
            return cut_rows(seq_lens, window, num_rows, most, shared if window is None else None)
        return whole_rows(seq_lens, window, num_rows)

    def __call__(
        self,
        q_THd: torch.Tensor,
        k_Thd: torch.Tensor,
        v_Thd: torch.Tensor,
        layer: int,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._write(k_Thd, v_Thd, layer)
        wait_previous_ubatch()
        return self._attend(q_THd, layer, sinks_H)

    def _write(self, k_Thd: torch.Tensor, v_Thd: torch.Tensor, layer: int) -> None:
        """Write the new K and V to the cache; they are rounded in place where it is in e4m3."""
        k_cache, v_cache, *exponents = self._caches[layer]
        slots = self.layers[self.specs[layer].window].slots
        if exponents:
            self._store_fp8(k_Thd, slots, k_cache, exponents[0])
            self._store_fp8(v_Thd, slots, v_cache, exponents[1])
        else:
            self._store_kv(k_Thd, v_Thd, slots, k_cache, v_cache)

    def _attend(
        self, q_THd: torch.Tensor, layer: int, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the attention of the decodes and of the tiles; rows of other sequences are undefined."""
        spec, caches = self.specs[layer], self._caches[layer]
        k_cache, v_cache, *exponents = caches
        layers, rows = self.layers[spec.window], self._num_decodes
        chunks = layers.chunks
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        if self._num_tokens < len(q_THd):
            out_THd[self._num_tokens :] = 0
        options: dict[str, Any] = {"scale": spec.scale, "sinks_H": sinks_H}
        form = self._forms.of(rows, shares=chunks.shared is not None) if chunks.cut else None
        self.decode(q_THd[:rows], caches, out_THd[:rows], chunks, form=form, **options)
        if self._prompts is not None:
            self._prompt_kernel.paged_attention(
                *(q_THd, k_cache, v_cache, out_THd, layers.block_table),
                *(self._prompts.tiles, self._prompts.starts, self._prompts.lens),
                window=spec.window,
                exponents=exponents,
                **options,
            )
        return out_THd

    def reserve_graphs(self, max_rows: int, max_seqs: int, max_blocks: int) -> None:
        programs = self._forms.programs(max_rows, shares=False)
        of_window = 3 * max_chunks(max_rows, programs) + max_rows + 1
        of_prompts = 2 * self._max_tiles(max_rows, max_seqs) + 2 * max_seqs + 1
        of_shared = (
            most_integers(max_rows, *self._heads_and_sms) if self.shared_reads is not None else 0
        )
        new: dict[str, Any] = {"device": self._device}
        self._graphs = GraphBuffers(
            max_seqs,
            torch.zeros(
                len(self._windows) * of_window + of_shared + of_prompts, dtype=torch.int32, **new
            ),
            {
                window: torch.zeros(max_seqs, max_blocks, dtype=torch.int64, **new)
                for window in self._windows
            },
            {window: torch.zeros(max_rows, dtype=torch.int64, **new) for window in self._windows},
        )

    def _max_tiles(self, num_rows: int, num_seqs: int) -> int:
        """Return the most tiles of any prompts and padding: a sequence may leave its last tile partly empty."""
        per_tile: int = self._prompt_kernel.tile_tokens(self._group)
        return num_rows // per_tile + num_seqs + 1

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        shared = self.shared_forms(num_rows, prompts=prompts)
        if prompts:
            return *shared, GraphForm.MIXED
        return *shared, GraphForm.EVEN_DECODES, GraphForm.DECODES

    def form(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> GraphForm:
        for shared in self.shared_forms(num_rows, prompts=prompts):
            if self.find_shared(batch) is not None:
                return shared
        if prompts:
            return GraphForm.MIXED
        whole = self._whole(batch.seq_lens_cpu, num_rows)
        return GraphForm.EVEN_DECODES if whole else GraphForm.DECODES

    def plan_graph(self, batch: AttentionBatch, num_rows: int, form: GraphForm) -> None:
        graphs = self._graphs
        assert graphs is not None, "reserve_graphs comes first"
        assert batch.num_seqs <= graphs.max_seqs and batch.num_tokens <= num_rows
        mixed, cuts = form.takes_prompts, form != GraphForm.EVEN_DECODES
        assert mixed or batch.num_single_rows == batch.num_seqs == batch.num_tokens
        decodes = min(num_rows, graphs.max_seqs) if mixed else num_rows
        shared = self.take_shared(batch) if form.shares else None
        lists = self._chunk_lists(batch, decodes, shared, cuts=cuts, shares=form.shares)
        tiles = self._tile_shape(decodes) if form.shares else None
        if tiles is not None:
            lists += cut_shared(shared, decodes, tiles).arrays
        if mixed:
            lists += self._padded_prompt_lists(batch, num_rows, decodes)
        packed = torch.from_numpy(np.concatenate(lists).astype(np.int32))
        integers = graphs.integers[: len(packed)]
        integers.copy_(packed, non_blocking=True)
        self._num_decodes, self._num_tokens = decodes, num_rows
        blocks = {it: self._copy_blocks(graphs, batch, it, num_rows) for it in self._windows}
        self._take(integers, lists, cuts, blocks, tiles)

    def shorten(self, lens_R: torch.Tensor, slots_R: torch.Tensor) -> None:
        assert self._prompts is None, "prompts have the lengths of their plan"
        assert self._windows == (None,), "layers with windows have slots of their own"
        assert len(lens_R) == len(slots_R) == self._num_decodes, (len(lens_R), self._num_decodes)
        planned = self._planned_layers[None]
        lens_C = lens_R.index_select(0, planned.chunks.seqs.clamp(min=0))
        # A chunk behind the end has no keys.
        chunks = replace(planned.chunks, ends=torch.minimum(planned.chunks.ends, lens_C))
        self.layers = {None: replace(planned, slots=slots_R, chunks=chunks)}

    def _padded_prompt_lists(
        self, batch: AttentionBatch, num_rows: int, num_seqs: int
    ) -> list[np.ndarray]:
        """`_prompt_lists` of fixed lengths, with tiles of the rows behind the batch."""
        seqs, firsts, starts, lens = self._prompt_lists(batch)
        per_tile = self._prompt_kernel.tile_tokens(self._group)
        behind = np.arange(batch.num_tokens, num_rows, per_tile)
        most = self._max_tiles(num_rows, num_seqs)
        padding = np.full(len(behind), self._prompt_kernel.PADDING.value)
        return [
            _extend(np.concatenate((seqs, padding)), most, self._prompt_kernel.NOTHING.value),
            _extend(np.concatenate((firsts, behind)), most, 0),
            _extend(starts, num_seqs + 1, batch.num_tokens),
            _extend(lens, num_seqs, 0),
        ]

    def _copy_blocks(
        self, graphs: GraphBuffers, batch: AttentionBatch, window: int | None, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the block table and the slots of layers with this window to those that captured forwards read."""
        table, slots = graphs.block_tables[window], graphs.slots[window][:num_rows]
        new_table, new_slots = batch.blocks_of(window)
        rows, columns = new_table.shape
        assert columns <= table.shape[1], "reserve_graphs was given fewer blocks"
        table[:rows, :columns].copy_(new_table)
        slots[: batch.num_tokens].copy_(new_slots[: batch.num_tokens])
        slots[batch.num_tokens :].fill_(-1)
        return table, slots


def _extend(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    assert len(values) <= length, (len(values), length)
    return np.concatenate((values, np.full(length - len(values), fill)))
