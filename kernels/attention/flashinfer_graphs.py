"""flashinfer's plans for CUDA graphs: what a captured forward reads has fixed addresses, filled before each replay.

All graphs run one after the other, so they share their buffers. A graph of decodes has one kernel with a row for each
sequence. One that takes prompts too has two: FlashAttention 2 for up to `max_seqs` decodes, FlashAttention 3 for the
prompts behind them, in pages or all new. They take their work from lists: none touches another's rows, and blocks
without work end at once.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from kernels.attention.base import AttentionBatch, GraphForm
from kernels.attention.flashinfer_decodes import (
    ALIGNMENT_BYTES,
    Decodes,
    Pages,
    Shape,
    chunk_pages,
    few_are_even,
    plan_new_prompts,
)

# Of a schedule of decodes; some 30 bytes a row are used.
SCHEDULE_BYTES = 2**20
PREFILL_TILE_ROWS = 128  # tokens, of one head
PREFILL_FIELDS = 8  # int32 of a tile in FlashAttention 3's schedule


NewRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q_THd, k_Thd, v_Thd of one layer
Caches = tuple[torch.Tensor, torch.Tensor]  # its K and V, with the new ones


class Planned(Protocol):
    """The attention of a captured forward, planned."""

    def run(self, new: NewRows, caches: Caches) -> torch.Tensor:
        """o_THd of one layer."""


class _PlannedDecodes:
    """One decode a row."""

    def __init__(self, num_rows: int, decodes: Decodes):
        self._num_rows, self._wrapper = num_rows, decodes.wrapper

    def run(self, new: NewRows, caches: Caches) -> torch.Tensor:
        q_THd, *_ = new
        assert len(q_THd) == self._num_rows, (len(q_THd), self._num_rows)
        out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
        return self._wrapper.run(q_THd, caches, out=out_THd)


class _PlannedMixed:
    """Decodes in the first rows, prompts behind them; `out` is kept, and holds zeros for the rows of neither."""

    def __init__(
        self,
        num_decode_rows: int,
        decodes: Any,
        prompts: Any,
        out_THd: torch.Tensor,
        *,
        all_new: bool,
    ):
        self._num_decode_rows, self._all_new = num_decode_rows, all_new
        self._decodes, self._prompts, self._out_THd = decodes, prompts, out_THd

    def run(self, new: NewRows, caches: Caches) -> torch.Tensor:
        q_THd, out_THd, rows = new[0], self._out_THd, self._num_decode_rows
        assert len(q_THd) == len(out_THd), (len(q_THd), len(out_THd))
        self._decodes.run(q_THd[:rows], caches, out=out_THd[:rows])
        if self._all_new:
            return self._prompts.run(*new, out=out_THd)
        return self._prompts.run(q_THd, caches, out=out_THd)


class _PageBuffers:
    """`Pages` at fixed addresses."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device):
        self.lengths = torch.zeros(2 * num_rows + 1, dtype=torch.int32, device=device)
        self.pages = torch.zeros(max_pages, dtype=torch.int32, device=device)

    def of(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Starts and last lengths where `Pages` of so many rows puts them, and the pages, as wrappers name them."""
        return {
            "paged_kv_indptr": self.lengths[: num_rows + 1],
            "paged_kv_last_page_len": self.lengths[num_rows + 1 : 2 * num_rows + 1],
            "paged_kv_indices": self.pages,
        }


class GraphPlans:
    """Buffers and wrappers of all graphs of one attention.

    slots   int64 [max_rows]: where each row's K and V go, -1 for nowhere
    """

    def __init__(
        self,
        flashinfer: Any,
        list_pages: Callable[..., None],
        shape: Shape,
        device: torch.device,
        *,
        max_rows: int,
        max_seqs: int,
        max_blocks: int,
    ):
        self._flashinfer, self._list_pages, self._shape = flashinfer, list_pages, shape
        self._max_rows, self._max_seqs = max_rows, max_seqs
        self._new = {"device": device}
        self.slots = torch.zeros(max_rows, dtype=torch.int64, **self._new)
        self._decode_pages = _PageBuffers(max_seqs, max_seqs * max_blocks, device)
        self._prompt_pages: _PageBuffers | None = None
        chunks = max(shape.graph_chunks(max_seqs), shape.num_blocks)
        self._workspace = self._bytes(chunks * shape.chunk_bytes(shape.tile) + ALIGNMENT_BYTES)
        self._schedule = self._bytes(SCHEDULE_BYTES)
        self._decodes: dict[tuple[int, bool], Decodes] = {}

    def plan(self, batch: AttentionBatch, num_rows: int, form: GraphForm) -> Planned:
        """As FlashInferAttention.plan_graph; also fills `slots`."""
        if form in (GraphForm.NEW_PROMPTS, GraphForm.MIXED):
            return self._plan_mixed(batch, num_rows, all_new=form == GraphForm.NEW_PROMPTS)
        assert batch.num_decodes == batch.num_seqs == batch.num_tokens <= num_rows
        slots = batch.slot_mapping, self.slots[:num_rows]
        cuts = form == GraphForm.DECODES
        return _PlannedDecodes(num_rows, self._plan_decodes(batch, num_rows, cuts, slots))

    def even(self, batch: AttentionBatch, num_rows: int) -> bool:
        """Whether no decode is so much longer than the others that it had better be cut."""
        shape = self._shape
        if num_rows < shape.num_blocks:
            return few_are_even(batch.seq_lens_cpu, shape.num_blocks)
        return self._chunk(-(-batch.seq_lens_cpu // shape.block_size), num_rows) is None

    def _plan_decodes(
        self, batch: AttentionBatch, num_rows: int, cuts: bool, slots: tuple[torch.Tensor, ...]
    ) -> Decodes:
        """The batch's decodes, one a row; also copies the first of `slots` to the second."""
        key = num_rows, cuts
        if key not in self._decodes:
            self._decodes[key] = self._new_decodes(num_rows, cuts)
        count = batch.num_decodes
        pages = self._ship(batch, slice(0, count), num_rows, self._decode_pages, slots)
        chunk = self._chunk_of(pages) if cuts else None
        self._decodes[key].plan(pages, num_rows, chunk, self._shape)
        return self._decodes[key]

    def _plan_mixed(self, batch: AttentionBatch, num_rows: int, *, all_new: bool) -> Planned:
        if self._prompt_pages is None:
            self._reserve_prompts()
        assert self._prompt_pages is not None
        slots, count = self.slots[:num_rows], len(batch.slot_mapping)
        slots[:count].copy_(batch.slot_mapping)
        slots[count:].fill_(-1)
        self._out_THd[batch.num_tokens : num_rows].zero_()
        first = batch.num_decodes
        decodes = self._ship(batch, slice(0, first), self._max_seqs, self._decode_pages)
        chunk = self._chunk_of(decodes)
        starts = self._query_starts(batch, 0, first)
        self._plan_pages(self._some_decodes, starts, decodes, fixed_split_size=chunk)
        starts = self._query_starts(batch, first, batch.num_seqs)
        prompts = self._new_prompts if all_new else self._prompts
        if all_new:
            plan_new_prompts(prompts, starts, self._shape)
        else:
            seqs = slice(first, batch.num_seqs)
            pages = self._ship(batch, seqs, self._max_seqs, self._prompt_pages)
            self._plan_pages(prompts, starts, pages, causal=True)
        rows, out_THd = min(num_rows, self._max_seqs), self._out_THd[:num_rows]
        return _PlannedMixed(rows, self._some_decodes, prompts, out_THd, all_new=all_new)

    def _query_starts(self, batch: AttentionBatch, first: int, end: int) -> torch.Tensor:
        """int32 [max_seqs + 1] of sequences `first` to `end` of the batch; the others have no rows."""
        starts = batch.query_start_loc_cpu[first : end + 1]
        query_starts = np.full(self._max_seqs + 1, starts[-1], np.int32)
        query_starts[: len(starts)] = starts
        return torch.from_numpy(query_starts)

    def _plan_pages(
        self, wrapper: Any, query_starts: torch.Tensor, pages: Pages, **options: Any
    ) -> None:
        wrapper.plan(
            query_starts,
            pages.starts_cpu,
            pages.pages[: pages.total],
            pages.last_lens_cpu,
            *self._shape.arguments,
            **options,
            **self._shape.types,
        )

    def _ship(
        self,
        batch: AttentionBatch,
        seqs: slice,
        num_rows: int,
        buffers: _PageBuffers,
        slots: tuple[torch.Tensor, ...] = (),
    ) -> Pages:
        """The pages of these sequences on the device, in `num_rows` rows."""
        pages = Pages(batch.seq_lens_cpu[seqs], self._shape.block_size, num_rows)
        assert pages.total <= len(buffers.pages), "reserve_graphs was given fewer blocks"
        pages.ship(buffers.pages, buffers.lengths)
        self._list_pages(batch.block_table[seqs], pages.starts, pages.pages, *slots)
        return pages

    def _chunk_of(self, pages: Pages) -> int | None:
        return self._chunk(np.diff(pages.starts_cpu.numpy()), pages.num_rows)

    def _chunk(self, num_pages: np.ndarray, num_rows: int) -> int | None:
        shape = self._shape
        return chunk_pages(num_pages, num_rows, shape.graph_chunks(num_rows), shape.num_blocks)

    def _new_decodes(self, num_rows: int, cuts: bool) -> Decodes:
        """Only its pinned memory is its own."""
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            use_cuda_graph=cuts,
            use_tensor_cores=True,
            **{f"{name}_buffer": it for name, it in self._decode_pages.of(num_rows).items()},
        )
        wrapper.reset_workspace_buffer(self._workspace, self._schedule)
        return Decodes(wrapper, self._flashinfer.fast_decode_plan, cuts=cuts)

    def _reserve_prompts(self) -> None:
        """What prompts need on top: wrappers whose addresses are those of the largest step."""
        spec, seqs = self._shape.spec, self._max_seqs
        self._prompt_pages = _PageBuffers(seqs, len(self._decode_pages.pages), self.slots.device)
        self._out_THd = torch.zeros(
            (self._max_rows, spec.num_heads, spec.head_dim), dtype=self._shape.dtype, **self._new
        )
        tiles = spec.num_heads * (-(-self._max_rows // PREFILL_TILE_ROWS) + seqs)
        schedule = self._bytes(4 * PREFILL_FIELDS * tiles + ALIGNMENT_BYTES)
        paged = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        pages = {f"{name}_buf": it for name, it in self._prompt_pages.of(seqs).items()}
        self._prompts = self._wrapper(paged, "fa3", schedule, self._max_rows, **pages)
        pages = {f"{name}_buf": it for name, it in self._decode_pages.of(seqs).items()}
        self._some_decodes = self._wrapper(paged, "fa2", self._schedule, seqs, **pages)
        ragged = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        starts = {"kv_indptr_buf": torch.zeros(seqs + 1, dtype=torch.int32, **self._new)}
        self._new_prompts = self._wrapper(ragged, "fa3", schedule, self._max_rows, **starts)

    def _wrapper(
        self,
        kind: Callable[..., Any],
        backend: str,
        schedule: torch.Tensor,
        max_rows: int,
        **buffers: torch.Tensor,
    ) -> Any:
        """For up to `max_seqs` sequences with `max_rows` rows together, at addresses that never change."""
        query_starts = torch.zeros(self._max_seqs + 1, dtype=torch.int32, **self._new)
        wrapper = kind(
            self._workspace,
            backend=backend,
            use_cuda_graph=True,
            qo_indptr_buf=query_starts,
            **buffers,
        )
        wrapper.reset_workspace_buffer(self._workspace, schedule)
        assert hasattr(wrapper, "_max_total_num_rows"), "flashinfer has changed"
        wrapper._max_total_num_rows = max_rows
        return wrapper

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, **self._new)
