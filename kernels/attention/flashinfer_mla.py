"""Latent attention (MLA) by flashinfer on Hopper GPUs in bfloat16; the decodes can be captured in CUDA graphs.

Decodes attend to the cached latents themselves: the up-projection of K moves to q, that of V behind the softmax
(absorbed). Prompts expand latents into heads of K and V, because from some 170 rows on that takes fewer operations:
those of the new rows first, then those of computed tokens in chunks, merged by their log-sum-exps.

T tokens, H heads, n and r unrotated and rotated values of a head of q and k, d = n + r, v values of a head of V,
u = n + v, C values of a latent, W = C + r, B decodes, M rows of prompts, L keys of a chunk.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.attention.base import AttentionBatch, GraphAttention, GraphForm
from kernels.attention.context_chunks import chunk_limit, cut_contexts
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.flashinfer_decodes import Pages
from kernels.attention.flashinfer_mla_shared import PAIRED_ROWS, SharedLatents, own_latents
from kernels.attention.flashinfer_modules import compile_missing, latent_modules
from kernels.attention.fp8_latents import latent_parts
from kernels.attention.latent_chunks import Chunk, slots_of
from kernels.attention.latent_up import LatentHeads
from kernels.attention.shared_prefixes import LATENTS_MIB, SharingCost
from kernels.host.hopper import on_hopper
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.pending import wait_previous_ubatch

# Of the latent and the rotated key: the sizes of every release, and the only ones that the kernel is built for.
RANK, ROPE_DIM = 512, 64
# Values of a head of q and k, and of v, in the prompts' kernel: those of DeepSeek and of GLM.
HEAD_DIMS = ((192, 128), (256, 256))
# For partial results of sequences that are cut: bfloat16 [2 * 132 * 64, C] and their log-sum-exps take 18 MB.
WORKSPACE_BYTES = 32 * 2**20
SCHEDULE_BYTES = 8 * 2**20  # of one wrapper
# A tile of one decode's heads is full from here on, so that stacked decodes compute no faster than they read.
MOST_SHARING_HEADS = 64


class FlashInferMlaAttention(GraphAttention):
    """Wrappers of flashinfer over one workspace; one instance is planned for one forward at a time."""

    name = "flashinfer_mla"
    devices = ("cuda",)
    auto = "latent attention (MLA), decodes on the pages where they lie, planned once a step"
    fused_store = cascades = True
    mla = True
    distributions: tuple[str, ...] = ("flashinfer-python",)

    def __init__(self, specs: Sequence[AttentionSpec], block_size: int):
        super().__init__(specs, block_size)
        import flashinfer

        from kernels.triton.expand_keys import expand_keys
        from kernels.triton.merge_attention import merge_attention
        from kernels.triton.paged import list_pages
        from kernels.triton.store_latents import store_latents

        self._flashinfer: Any = flashinfer
        self._list_pages, self._store_latents = list_pages, store_latents
        self._expand_keys, self._merge_attention = expand_keys, merge_attention
        spec = self.spec = self.specs[0]
        assert spec.mla is not None
        self.dims = spec.mla
        # Rows of decodes and of all sequences in the planned forward, and the chunks of its prompts' computed tokens.
        self._num_decodes = self._num_rows = 0
        self._chunks: list[Chunk] = []
        self._chunk_wrappers: list[Any] = []
        self._graph_pages: torch.Tensor | None = None
        self._sharing: SharedLatents | None = None
        self._shares = False  # of the planned decodes
        self.sharing_cost = replace(
            SharingCost.on_gpu(self.kv_layout(spec), LATENTS_MIB),
            group_rows=max(2, -(-PAIRED_ROWS // spec.num_heads)),
        )

    @classmethod
    def cascade_refusal(cls, specs: Iterable[AttentionSpec]) -> str | None:
        heads = max((spec.num_heads for spec in specs), default=0)
        if heads > MOST_SHARING_HEADS:
            return f"{heads} heads compute for as long as they read latents"
        return super().cascade_refusal(specs)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if not on_hopper(device):
            return "it needs a Hopper GPU (compute capability 9.0)"
        return FlashInferAttention.unavailable(device)

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if shape.dtype != torch.bfloat16:
            return f"it computes in bfloat16, model.dtype is {shape.dtype_name}"
        if reason := super().unsupported_reason(shape):
            return reason
        if len(set(shape.attention_specs)) > 1:
            return "it takes layers of one shape, the model's differ"
        for spec in shape.attention_specs[:1]:
            dims = spec.mla
            assert dims is not None
            if (dims.rank, dims.rope_dim) != (RANK, ROPE_DIM):
                found = f"{dims.rank} and {dims.rope_dim}"
                return f"it takes latents of {RANK} and rotated keys of {ROPE_DIM} values, the model's have {found}"
            if (spec.head_dim, dims.value_dim) not in HEAD_DIMS:
                known = " or ".join(f"{qk} and {v}" for qk, v in HEAD_DIMS)
                found = f"{spec.head_dim} and {dims.value_dim}"
                return f"it takes heads of {known} values in k and v, the model's have {found}"
        return None

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        """Return the bytes of the workspace and of three schedules; each chunk of a prompt's context has one more."""
        return WORKSPACE_BYTES + 3 * SCHEDULE_BYTES

    @classmethod
    def compile_kernels(cls, dtype: torch.dtype, specs: Iterable[AttentionSpec]) -> None:
        compile_missing(latent_modules(dtype, specs))

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Also compile flashinfer's kernels, if this machine has not done so before (minutes)."""
        super().bind(kv_caches)
        self._latents = [
            latent_parts(cache, spec, self.block_size)
            for spec, cache in zip(self.specs, kv_caches, strict=False)
        ]
        self._chunks, self._chunk_wrappers, self._graph_pages = [], [], None
        if not kv_caches:
            return
        wanted = torch.uint8 if self.spec.fp8_cache else torch.bfloat16
        assert kv_caches[0].dtype == wanted, kv_caches[0].dtype
        device = self._device = kv_caches[0].device
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._new_rows = self._ragged()
        self._plan_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.compile_kernels(torch.bfloat16, self.specs)
        self._load()

    def _ragged(self) -> Any:
        return self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, backend="fa3")

    def _load(self) -> None:
        """Plan one token as decode and as prompt, which loads the modules."""
        self._load_decodes()
        ends = np.arange(2, dtype=np.int32)
        self._plan_prompts(self._new_rows, ends, ends, causal=True)
        torch.cuda.synchronize(self._device)

    def _load_decodes(self) -> None:
        mla = self._flashinfer.mla.BatchMLAPagedAttentionWrapper
        self._decodes = mla(self._workspace, backend="fa3")
        if self.shared_reads is not None:
            wrapper = mla(self._workspace, backend="fa3")
            place = self.block_size, self._device
            self._sharing = SharedLatents(wrapper, self._plan_latents, self._list_pages, *place)
        page = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._plan_decodes(torch.arange(2, dtype=torch.int32), page, np.ones(1, dtype=np.int32))

    def plan(self, batch: AttentionBatch) -> None:
        self._slots = batch.slot_mapping
        self._num_decodes, self._num_rows = batch.num_single_rows, batch.num_tokens
        self._chunks = []
        # Schedules are copied to the device from pinned memory that this plan overwrites.
        self._plan_copied.synchronize()
        self._shares = False
        if batch.num_single_rows:
            self._plan_single_rows(batch)
        if batch.num_seqs > batch.num_single_rows:
            self._plan_extends(batch)
        self._plan_copied.record()

    def _plan_single_rows(self, batch: AttentionBatch) -> None:
        shared = self.take_shared(batch)
        if shared is not None and self._sharing is not None:
            self._shares = True
            self._sharing.plan(batch, shared)
        lens, table = own_latents(batch, shared, self.block_size)
        pages = Pages(lens, self.block_size)
        pages.ship(torch.empty(pages.total, dtype=torch.int32, device=self._device))
        self._list_pages(table, pages.starts, pages.pages)
        self._plan_decodes(pages.starts_cpu, pages.pages, lens)

    def _plan_decodes(
        self, page_starts_cpu: torch.Tensor, pages: torch.Tensor, lens_cpu: np.ndarray
    ) -> None:
        """Plan one row a sequence; a length of 0 gives a row of zeros."""
        rows = np.arange(len(lens_cpu) + 1, dtype=np.int32)
        self._plan_latents(self._decodes, rows, page_starts_cpu, pages, lens_cpu)

    def _plan_latents(
        self,
        wrapper: Any,
        rows: np.ndarray,
        page_starts_cpu: torch.Tensor,
        pages: torch.Tensor,
        lens_cpu: np.ndarray,
    ) -> None:
        """Plan sequences, all rows of which see all latents; rows are int32 [sequences + 1].

        The launch depends on whether a sequence has more than 64 heads of rows on average, and on no more.
        """
        wrapper.plan(
            torch.from_numpy(rows),
            page_starts_cpu,
            pages,
            torch.from_numpy(np.ascontiguousarray(lens_cpu, dtype=np.int32)),
            self.spec.num_heads,
            self.dims.rank,
            self.dims.rope_dim,
            self.block_size,
            False,  # causal: one row sees all of its sequence
            self.spec.scale,
            torch.bfloat16,
            torch.bfloat16,
        )

    def _plan_prompts(
        self, wrapper: Any, rows: np.ndarray, keys: np.ndarray, *, causal: bool
    ) -> None:
        """Plan prompts; rows and keys are int32 [sequences + 1], where each one's rows and keys start."""
        heads = self.spec.num_heads
        wrapper.plan(
            torch.from_numpy(rows),
            torch.from_numpy(keys),
            heads,
            heads,
            self.spec.head_dim,
            head_dim_vo=self.dims.value_dim,
            causal=causal,
            sm_scale=self.spec.scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )

    def _plan_extends(self, batch: AttentionBatch) -> None:
        """Plan the sequences behind the decodes: their new rows, then their computed tokens in chunks."""
        first = batch.num_single_rows
        starts = batch.query_start_loc_cpu[first:] - batch.query_start_loc_cpu[first]
        self._plan_prompts(self._new_rows, starts, starts, causal=True)
        contexts = batch.seq_lens_cpu[first:] - np.diff(starts)
        table = batch.block_table[first:]
        limit = chunk_limit(int(starts[-1]), self.block_size)
        for number, pieces in enumerate(cut_contexts(contexts, limit, self.block_size)):
            if number == len(self._chunk_wrappers):
                self._chunk_wrappers.append(self._ragged())
            wrapper = self._chunk_wrappers[number]
            rows = starts[pieces[0].seq : pieces[-1].seq + 2]
            keys = np.cumsum([0, *(piece.end - piece.start for piece in pieces)], dtype=np.int32)
            self._plan_prompts(wrapper, rows - rows[0], keys, causal=False)
            slots = torch.cat([slots_of(table, it, self.block_size) for it in pieces])
            chunk = slice(int(rows[0]), int(rows[-1])), slots, wrapper
            self._chunks.append(
                Chunk(*chunk, rows[:-1].astype(np.int64), np.diff(keys).astype(np.int64))
            )

    def store_latents(
        self,
        q_THd: torch.Tensor,
        latent_TW: torch.Tensor,
        layer: int,
        rotation_T1r: torch.Tensor,
        norm_C: torch.Tensor,
        eps: float,
    ) -> None:
        parts = self._latents[layer]
        self._store_latents(q_THd, latent_TW, norm_C, eps, rotation_T1r, self._slots, *parts)
        wait_previous_ubatch()

    def attend_latent(
        self, q_THd: torch.Tensor, latent_TW: torch.Tensor, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        out_THv = q_THd.new_empty(*q_THd.shape[:2], self.dims.value_dim)
        split, end = self._num_decodes, self._num_rows
        assert end <= len(q_THd), (end, len(q_THd))
        if split:
            self._decode(q_THd[:split], heads, layer, out_THv[:split])
        if split < end:
            prompts = slice(split, end)
            expand = partial(self._expand, heads)
            slots_M = heads.slots(prompts)
            self._extend(
                q_THd[prompts], latent_TW[prompts], expand, slots_M, layer, out_THv[prompts]
            )
        if end < len(q_THd):
            out_THv[end:] = 0
        return out_THv

    def _decode(
        self, q_BHd: torch.Tensor, heads: LatentHeads, layer: int, out_BHv: torch.Tensor
    ) -> None:
        """Write the attention of the planned decodes to out_BHv."""
        nope = self.dims.nope_dim
        q_HBC = heads.absorb(q_BHd, nope)
        o_HBC = self._attend_absorbed(q_HBC, q_BHd[..., nope:], layer)
        heads.values(o_HBC, nope, out_BHv)

    def _attend_absorbed(
        self, q_HBC: torch.Tensor, rope_BHr: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Return the attention of the planned decodes over the latents themselves, [H, B, C]."""
        q_BHC, latents = q_HBC.transpose(0, 1), self._latents[layer]
        if not self._shares:
            o_HBC = torch.empty_like(q_HBC)
            self._decodes.run(q_BHC, rope_BHr, *latents, out=o_HBC.transpose(0, 1))
            return o_HBC
        assert self._sharing is not None
        o_BHC = torch.empty(q_BHC.shape, dtype=q_BHC.dtype, device=q_BHC.device)
        lse_BH = o_BHC.new_empty(o_BHC.shape[:2], dtype=torch.float32)
        own = {"out": o_BHC, "lse": lse_BH, "return_lse": True}
        self._decodes.run(q_BHC, rope_BHr, *latents, **own)
        self._merge_attention(o_BHC, lse_BH, *self._sharing.run(q_BHC, rope_BHr, latents))
        return o_BHC.transpose(0, 1)

    def _extend(
        self,
        q_MHd: torch.Tensor,
        latent_MW: torch.Tensor,
        expand: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        slots_M: torch.Tensor | None,
        layer: int,
        out_MHv: torch.Tensor,
    ) -> None:
        """Write the attention of the planned prompts to out_MHv; slots_M as LatentHeads.slots."""
        kv = expand(latent_MW, slots_M)
        if not self._chunks:
            self._new_rows.run(q_MHd, *kv, out=out_MHv)
            return
        _, lse_MH = self._new_rows.run(q_MHd, *kv, out=out_MHv, return_lse=True)
        del kv  # its memory is enough for a chunk
        for chunk in self._chunks:
            rows = chunk.rows
            kv = expand(self._cached(layer, chunk.slots), chunk.adapters(slots_M))
            found = chunk.wrapper.run(q_MHd[rows], *kv, return_lse=True)
            self._merge_attention(out_MHv[rows], lse_MH[rows], *found)
            del kv, found

    def _cached(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the latents [L, W] of these slots."""
        return self.kv_caches[layer].view(-1, self.dims.width).index_select(0, slots)

    def _expand(
        self, heads: LatentHeads, latent_LW: torch.Tensor, slots_L: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the heads of K [L, H, d] and V [L, H, v], a view; slots_L as LatentHeads.expand."""
        rank, nope = self.dims.rank, self.dims.nope_dim
        kv_LHu = heads.expand(latent_LW[:, :rank], slots_L)
        return self._expand_keys(kv_LHu, latent_LW[:, rank:], nope), kv_LHu[..., nope:]

    def reserve_graphs(self, max_rows: int, max_seqs: int, max_blocks: int) -> None:
        new: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        self._graph_pages = torch.zeros(max_seqs * max_blocks, **new)
        self._graph_lengths = torch.zeros(2 * max_rows + 1, **new)
        self._graph_slots = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        if self._sharing is not None:
            self._sharing.reserve_graphs(max_rows, max_blocks)

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        assert not prompts, "steps with prompts are not captured"
        return *self.shared_forms(num_rows, prompts=False), GraphForm.DECODES

    def form(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> GraphForm:
        *special, general = self.forms(num_rows, prompts=prompts)
        return special[0] if special and self.find_shared(batch) is not None else general

    def plan_graph(self, batch: AttentionBatch, num_rows: int, form: GraphForm) -> None:
        assert self._graph_pages is not None, "reserve_graphs comes first"
        assert batch.num_single_rows == batch.num_seqs == batch.num_tokens <= num_rows
        self._plan_copied.synchronize()
        shared, self._shares = None, form.shares
        if form.shares and self._sharing is not None:
            shared = self.take_shared(batch)
            self._sharing.plan_graph(batch, shared, num_rows)
        own_lens, table = own_latents(batch, shared, self.block_size)
        pages = Pages(own_lens, self.block_size, num_rows)
        assert pages.total <= len(self._graph_pages), "reserve_graphs was given fewer blocks"
        pages.ship(self._graph_pages, self._graph_lengths)
        slots = batch.slot_mapping, self._graph_slots[:num_rows]
        self._list_pages(table, pages.starts, pages.pages, *slots)
        lens = np.zeros(num_rows, np.int32)
        lens[: batch.num_seqs] = own_lens
        self._plan_decodes(pages.starts_cpu, pages.pages, lens)
        self._slots, self._chunks = self._graph_slots[:num_rows], []
        self._num_decodes = self._num_rows = num_rows
        self._plan_copied.record()
