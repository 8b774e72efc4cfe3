"""flashinfer's plans for CUDA graphs: what a captured forward reads has fixed addresses, filled before each replay.

Graphs run one after the other, so all graphs share buffers. A graph of decodes has one kernel with a row for each
sequence. A graph with prompts has two kernels: FlashAttention 2 for up to `max_seqs` decodes, FlashAttention 3 for the
prompts behind them, in pages or all new. Both take their work from lists: neither writes rows of the other, and blocks
of threads without work end at once. A graph of decodes with drafts has FlashAttention 2 alone, where query heads of one
KV head share tiles. FlashAttention 3 has tiles for each query head, and the host schedules each tile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kernels.attention.base import AttentionBatch, GraphForm
from kernels.attention.flashinfer_decodes import (
    ALIGNMENT_BYTES,
    Decodes,
    PageBuffers,
    Pages,
    Shape,
    chunk_pages,
    few_are_even,
    plan_new_prompts,
)
from kernels.attention.flashinfer_extends import GraphExtends
from kernels.attention.flashinfer_planned import PlannedDecodes, PlannedDrafts, PlannedMixed
from kernels.attention.flashinfer_plans import Planned
from kernels.attention.flashinfer_shared import SharedDecodes

# Of a schedule of decodes; some 30 bytes a row are used.
SCHEDULE_BYTES = 2**20
# Of partial results of decodes with drafts, at most: 512 rows of 4,096 query values take 202 MB.
DRAFT_BYTES = 256 * 2**20
PREFILL_TILE_ROWS = 128  # tokens, of one head
PREFILL_FIELDS = 8  # int32 of a tile in FlashAttention 3's schedule


class GraphPlans:
    """Buffers and wrappers of all graphs of one attention.

    slots   int64 [max_rows]: slot of each row's K and V, -1 for none
    """

    def __init__(
        self,
        flashinfer: Any,
        list_pages: Callable[..., None],
        shapes: Sequence[Shape],
        device: torch.device,
        *,
        max_rows: int,
        max_seqs: int,
        max_blocks: int,
    ):
        self._list_pages, self._block_size = list_pages, shapes[0].block_size
        self._max_seqs, self._device = max_seqs, device
        self.slots = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._decode_pages = PageBuffers(max_seqs, max_seqs * max_blocks, device)
        self._prompt_pages: PageBuffers | None = None
        self._drafts: dict[int, tuple[PageBuffers, torch.Tensor]] = {}  # by rows
        workspace = torch.zeros(
            max(_workspace_bytes(shape, max_seqs) for shape in shapes),
            dtype=torch.uint8,
            device=device,
        )
        self._of_shape = [
            _ShapeGraphs(
                flashinfer,
                shape,
                workspace,
                self._decode_pages,
                max_rows=max_rows,
                max_seqs=max_seqs,
            )
            for shape in shapes
        ]

    def plan(
        self,
        batch: AttentionBatch,
        num_rows: int,
        form: GraphForm,
        shared: SharedDecodes | None = None,
    ) -> list[Planned]:
        """Fill `slots` and all buffers; return the plan of each shape. See GraphAttention.plan_graph.

        shared   computes decodes in a form that shares blocks
        """
        assert not form.shares or shared is not None
        if form == GraphForm.DRAFTS:
            return self._plan_drafts(batch, num_rows)
        if form.takes_prompts:
            all_new = form == GraphForm.NEW_PROMPTS
            return self._plan_mixed(
                batch, num_rows, shared if form.shares else None, all_new=all_new
            )
        if form.shares and shared is not None:
            shared.plan_graph(batch, num_rows)
            self.slots[:num_rows].copy_(shared.slots)
            return [graphs.planned_shared(num_rows, shared) for graphs in self._of_shape]
        assert batch.num_single_rows == batch.num_seqs == batch.num_tokens <= num_rows
        slots = batch.slot_mapping, self.slots[:num_rows]
        cuts = form == GraphForm.DECODES
        pages = self._ship(
            batch, slice(0, batch.num_single_rows), num_rows, self._decode_pages, slots
        )
        return [graphs.plan_decodes(pages, num_rows, cuts=cuts) for graphs in self._of_shape]

    def shorten(self, lens_R: torch.Tensor) -> None:
        """Let the planned decodes have these lengths, int32 [R]; see GraphAttention.shorten.

        The lists of pages stay, so a last page has 0 tokens or less where a sequence ends on a page before it. The
        kernels add tokens and pages in integers, and keep chunks of keys within the sum.
        """
        count = len(lens_R)
        starts, last_lens = (
            self._decode_pages.lengths[: count + 1],
            self._decode_pages.lengths[count + 1 : 2 * count + 1],
        )
        before_R = (starts.diff() - 1) * self._block_size
        last_lens.copy_(lens_R - before_R)

    def even(self, batch: AttentionBatch, num_rows: int) -> bool:
        """Return whether all decodes are short enough to be left whole, in every shape."""
        return all(graphs.even(batch.seq_lens_cpu, num_rows) for graphs in self._of_shape)

    def _fill_slots(self, batch: AttentionBatch, num_rows: int) -> None:
        slots, count = self.slots[:num_rows], len(batch.slot_mapping)
        slots[:count].copy_(batch.slot_mapping)
        slots[count:].fill_(-1)

    def takes_drafts(self, num_rows: int) -> bool:
        """Return whether graphs of so many rows have the form DRAFTS."""
        return all(graphs.draft_bytes(num_rows) <= DRAFT_BYTES for graphs in self._of_shape)

    def _plan_drafts(self, batch: AttentionBatch, num_rows: int) -> list[Planned]:
        """Plan each row as if it might be a sequence: then partial results take as much memory as those of decodes."""
        if num_rows not in self._drafts:
            self._drafts[num_rows] = self._reserve_drafts(num_rows)
        buffers, workspace = self._drafts[num_rows]
        slots = batch.slot_mapping, self.slots[:num_rows]
        every = slice(0, batch.num_seqs)
        pages = self._ship(batch, every, num_rows, buffers, slots, queries=True)
        if batch.behind is not None:
            # The lists of pages stay, see `shorten`; a chunk of keys behind the end has none.
            pages.last_lens[: batch.num_seqs].sub_(batch.behind)
        return [
            graphs.plan_drafts(pages, buffers, workspace, batch.num_tokens)
            for graphs in self._of_shape
        ]

    def _reserve_drafts(self, num_rows: int) -> tuple[PageBuffers, torch.Tensor]:
        """Return pages and workspace for so many rows: those of a larger graph, which usually is captured first."""
        larger = next((rows for rows in self._drafts if rows >= num_rows), None)
        if larger is not None:
            return self._drafts[larger]
        size = max(graphs.draft_bytes(num_rows) for graphs in self._of_shape)
        workspace = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return PageBuffers(num_rows, len(self._decode_pages.pages), self._device), workspace

    def _plan_mixed(
        self,
        batch: AttentionBatch,
        num_rows: int,
        shared: SharedDecodes | None,
        *,
        all_new: bool,
    ) -> list[Planned]:
        if self._prompt_pages is None:
            self._prompt_pages = self._reserve_prompts()
        self._fill_slots(batch, num_rows)
        first = batch.num_single_rows
        if shared is not None:
            shared.plan_graph(batch, min(num_rows, self._max_seqs))
        else:
            pages = self._decode_pages
            decodes = self._ship(batch, slice(0, first), self._max_seqs, pages, queries=True)
            for graphs in self._of_shape:
                graphs.plan_some_decodes(decodes)
        seqs, starts = slice(first, batch.num_seqs), batch.query_start_loc_cpu[first:]
        if all_new:
            prompts = Pages(batch.seq_lens_cpu[seqs], self._block_size, self._max_seqs, starts)
        else:
            pages = self._prompt_pages
            prompts = self._ship(batch, seqs, self._max_seqs, pages, queries=True)
        return [
            graphs.plan_prompts(prompts, num_rows, batch.num_tokens, shared, all_new=all_new)
            for graphs in self._of_shape
        ]

    def _ship(
        self,
        batch: AttentionBatch,
        seqs: slice,
        num_rows: int,
        buffers: PageBuffers,
        slots: tuple[torch.Tensor, ...] = (),
        *,
        queries: bool = False,
    ) -> Pages:
        """Fill the buffers with the pages of these sequences, in `num_rows` rows; copy slots[0] to slots[1].

        queries   also with the rows of q where the sequences start
        """
        starts = batch.query_start_loc_cpu[seqs.start : seqs.stop + 1] if queries else None
        pages = Pages(batch.seq_lens_cpu[seqs], self._block_size, num_rows, starts)
        assert pages.total <= len(buffers.pages), "reserve_graphs was given fewer blocks"
        pages.ship(buffers.pages, buffers.lengths)
        self._list_pages(batch.block_table[seqs], pages.starts, pages.pages, *slots)
        return pages

    def _reserve_prompts(self) -> PageBuffers:
        pages = PageBuffers(self._max_seqs, len(self._decode_pages.pages), self._device)
        for graphs in self._of_shape:
            graphs.reserve_prompts(pages)
        return pages


def _workspace_bytes(shape: Shape, max_seqs: int) -> int:
    chunks = max(shape.graph_chunks(max_seqs), shape.num_blocks)
    return chunks * shape.chunk_bytes(shape.tile) + ALIGNMENT_BYTES


class _ShapeGraphs:
    """Wrappers of all graphs for the layers of one shape. Pages and workspace are shared with other shapes."""

    def __init__(
        self,
        flashinfer: Any,
        shape: Shape,
        workspace: torch.Tensor,
        decode_pages: PageBuffers,
        *,
        max_rows: int,
        max_seqs: int,
    ):
        self._flashinfer, self._shape, self._workspace = flashinfer, shape, workspace
        self._decode_pages, self._device = decode_pages, workspace.device
        self._max_rows, self._max_seqs = max_rows, max_seqs
        self._schedule = self._bytes(SCHEDULE_BYTES)
        self._decodes: dict[tuple[int, bool], Decodes] = {}
        self._drafts: dict[int, GraphExtends] = {}
        self._out_THd: torch.Tensor | None = None

    def even(self, seq_lens: np.ndarray, num_rows: int) -> bool:
        """Return whether decodes of these lengths are all left whole."""
        shape = self._shape
        if num_rows < shape.num_blocks:
            return few_are_even(seq_lens, shape.num_blocks)
        return self._chunk(-(-seq_lens // shape.block_size), num_rows) is None

    def plan_decodes(self, pages: Pages, num_rows: int, *, cuts: bool) -> Planned:
        """Plan one decode a row."""
        key = num_rows, cuts
        if key not in self._decodes:
            self._decodes[key] = self._new_decodes(num_rows, cuts)
        chunk = self._chunk_of(pages) if cuts else None
        self._decodes[key].plan(pages, num_rows, chunk, self._shape)
        return PlannedDecodes(num_rows, self._decodes[key].wrapper)

    def draft_bytes(self, num_rows: int) -> int:
        """Return the bytes of partial results of a graph of decodes with drafts."""
        return _workspace_bytes(self._shape, num_rows)

    def plan_drafts(
        self, pages: Pages, buffers: PageBuffers, workspace: torch.Tensor, num_tokens: int
    ) -> Planned:
        """Plan decodes with drafts behind them, in as many rows as `pages` has."""
        num_rows = pages.num_rows
        if num_rows not in self._drafts:
            rows = num_rows, num_rows
            kernel = self._paged("fa2", self._schedule, rows, buffers, causal=True)
            kernel.wrapper.reset_workspace_buffer(workspace, self._schedule)
            self._drafts[num_rows] = kernel
        kernel, out_THd = self._drafts[num_rows], self._output()[:num_rows]
        out_THd[num_tokens:].zero_()
        kernel.plan(pages)
        return PlannedDrafts(kernel, out_THd)

    def _output(self) -> torch.Tensor:
        """Return the output of graphs with sequences of several rows [max_rows, H, d]: its address stays."""
        if self._out_THd is None:
            spec = self._shape.spec
            self._out_THd = torch.zeros(
                (self._max_rows, spec.num_heads, spec.head_dim),
                dtype=self._shape.dtype,
                device=self._device,
            )
        return self._out_THd

    def plan_some_decodes(self, pages: Pages) -> None:
        """Plan the decodes of a step with prompts."""
        self._some_decodes.plan(pages, self._chunk_of(pages))

    def planned_shared(self, num_rows: int, shared: SharedDecodes) -> Planned:
        """Return the decodes that `shared` has planned, one a row."""
        return PlannedDecodes(num_rows, shared.of(self._shape.spec))

    def plan_prompts(
        self,
        pages: Pages,
        num_rows: int,
        num_tokens: int,
        shared: SharedDecodes | None,
        *,
        all_new: bool,
    ) -> Planned:
        """Plan prompts behind the decodes of `shared` or `plan_some_decodes`; all_new: K and V are the new rows."""
        out_THd = self._output()[:num_rows]
        out_THd[num_tokens:].zero_()
        if all_new:
            plan_new_prompts(self._new_prompts, pages.query_starts_cpu, self._shape)
        else:
            self._prompts.plan(pages)
        prompts = self._new_prompts if all_new else self._prompts
        rows = min(num_rows, self._max_seqs)
        decodes = self._some_decodes if shared is None else shared.of(self._shape.spec)
        return PlannedMixed(rows, decodes, prompts, out_THd, all_new=all_new)

    def reserve_prompts(self, prompt_pages: PageBuffers) -> None:
        """Allocate for graphs with prompts: wrappers with the addresses of the largest step."""
        spec, seqs = self._shape.spec, self._max_seqs
        tiles = spec.num_heads * (-(-self._max_rows // PREFILL_TILE_ROWS) + seqs)
        schedule = self._bytes(4 * PREFILL_FIELDS * tiles + ALIGNMENT_BYTES)
        most, pages = (self._max_rows, seqs), self._decode_pages
        self._prompts = self._paged("fa3", schedule, most, prompt_pages, causal=True)
        self._some_decodes = self._paged("fa2", self._schedule, (seqs, seqs), pages, causal=False)
        ragged = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        starts = {
            name: torch.zeros(seqs + 1, dtype=torch.int32, device=self._device)
            for name in ("qo_indptr_buf", "kv_indptr_buf")
        }
        self._new_prompts = self._wrapper(ragged, "fa3", schedule, self._max_rows, **starts)

    def _paged(
        self,
        backend: str,
        schedule: torch.Tensor,
        most: tuple[int, int],
        pages: PageBuffers,
        *,
        causal: bool,
    ) -> GraphExtends:
        """A kernel that reads `pages`, for up to so many rows of q and so many sequences."""
        max_rows, max_seqs = most
        buffers = {f"{name}_buf": it for name, it in pages.of(max_seqs).items()}
        buffers["qo_indptr_buf"] = pages.query_starts(max_seqs)
        paged = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        wrapper = self._wrapper(paged, backend, schedule, max_rows, **buffers)
        return GraphExtends(wrapper, self._shape, causal=causal)

    def _chunk_of(self, pages: Pages) -> int | None:
        return self._chunk(np.diff(pages.starts_cpu.numpy()), pages.num_rows)

    def _chunk(self, num_pages: np.ndarray, num_rows: int) -> int | None:
        shape = self._shape
        return chunk_pages(num_pages, num_rows, shape.graph_chunks(num_rows), shape.num_blocks)

    def _new_decodes(self, num_rows: int, cuts: bool) -> Decodes:
        """A wrapper that shares all but its pinned memory."""
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            use_cuda_graph=cuts,
            use_tensor_cores=True,
            **{f"{name}_buffer": it for name, it in self._decode_pages.of(num_rows).items()},
        )
        wrapper.reset_workspace_buffer(self._workspace, self._schedule)
        return Decodes(wrapper, self._flashinfer.fast_decode_plan, cuts=cuts)

    def _wrapper(
        self,
        kind: Callable[..., Any],
        backend: str,
        schedule: torch.Tensor,
        max_rows: int,
        **buffers: torch.Tensor,
    ) -> Any:
        """A wrapper for sequences with up to `max_rows` rows together, at addresses that never change."""
        wrapper = kind(self._workspace, backend=backend, use_cuda_graph=True, **buffers)
        wrapper.reset_workspace_buffer(self._workspace, schedule)
        assert hasattr(wrapper, "_max_total_num_rows"), "flashinfer has changed"
        wrapper._max_total_num_rows = max_rows
        return wrapper

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)
