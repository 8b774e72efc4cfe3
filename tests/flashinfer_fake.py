"""flashinfer's wrappers in operators of torch, for a CPU; in graphs they read their lists at fixed addresses.

They check what flashinfer 0.6.6 asks of a plan.

R query rows, L rows of K and V, H query heads, h KV heads, d head dim, B sequences.
"""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.attention import flashinfer
from kernels.attention.flashinfer import FlashInferAttention


def attend(
    q_RHd: torch.Tensor, k_Lhd: torch.Tensor, v_Lhd: torch.Tensor, scale: float, *, causal: bool
) -> torch.Tensor:
    """The last query row is that of the last row of K and V. Without K and V it is 0."""
    if not len(k_Lhd):
        return torch.zeros_like(q_RHd)
    k_LHd, v_LHd = (it.repeat_interleave(q_RHd.shape[1] // it.shape[1], 1) for it in (k_Lhd, v_Lhd))
    scores_HRL = torch.einsum("rhd,lhd->hrl", q_RHd, k_LHd) * scale
    if causal:
        rows, keys = scores_HRL.shape[1:]
        scores_HRL += torch.full((rows, keys), -math.inf).triu(keys - rows + 1)
    return torch.einsum("hrl,lhd->rhd", scores_HRL.softmax(-1), v_LHd)


class Wrapper:
    """What the wrappers have in common. Lists of a graph stay in the buffers that it was made with."""

    def __init__(
        self,
        workspace: torch.Tensor,
        backend: str = "fa2",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        **buffers: torch.Tensor,
    ):
        assert workspace.dtype == torch.uint8
        self._float_workspace_buffer = self._int_workspace_buffer = workspace
        self._pin_memory_int_workspace_buffer = workspace
        self._backend, self._in_graph = backend, use_cuda_graph
        self._max_total_num_rows: int | None = None
        for name, it in buffers.items():
            setattr(self, f"_{name.replace('_buffer', '_buf')}", it)
        if use_cuda_graph:
            starts = next(it for name, it in buffers.items() if "indptr" in name)
            self._fixed_batch_size = len(starts) - 1

    def reset_workspace_buffer(self, workspace: torch.Tensor, schedule: torch.Tensor) -> None:
        pass

    def keep(self, **lists: torch.Tensor) -> None:
        """Keep the lists of a plan: in a graph in their buffers."""
        for name, it in lists.items():
            if self._in_graph:
                getattr(self, name)[: len(it)].copy_(it)
            else:
                setattr(self, name, it)

    def check(self, starts: torch.Tensor, pages: torch.Tensor, lens_B: torch.Tensor) -> None:
        """starts, pages: of query rows and pages on the host, B + 1 each."""
        assert len(starts) == len(pages) == len(lens_B) + 1 > 1, "it divides by the sequences"
        assert not self._in_graph or len(lens_B) == self._fixed_batch_size
        for it in (starts, pages, lens_B):
            assert it.device.type == "cpu" and it.dtype == torch.int32, (it.device, it.dtype)
        assert (starts.diff() >= 0).all() and (pages.diff() >= 0).all() and (lens_B >= 0).all()
        assert starts[-1] <= (self._max_total_num_rows or starts[-1])
        self._starts, self._lens = starts.tolist(), lens_B.tolist()

    def pages_of(self, caches: Any, seq: int) -> list[torch.Tensor]:
        """Return the rows of K and V of a sequence. fa3 takes its length from the plan."""
        first, end = self._paged_kv_indptr_buf[seq : seq + 2].tolist()
        last = int(self._paged_kv_last_page_len_buf[seq])
        count = self._lens[seq] if self._backend == "fa3" else (end - first - 1) * self._page + last
        count = max(0, count)
        pages = self._paged_kv_indices_buf[first:end].long()
        return [cache[pages].flatten(0, 1)[:count] for cache in caches]

    _paged_kv_indptr_buf: torch.Tensor
    _paged_kv_indices_buf: torch.Tensor
    _paged_kv_last_page_len_buf: torch.Tensor
    _qo_indptr_buf: torch.Tensor
    _page: int


def lens_of(starts: torch.Tensor, last: torch.Tensor, page: int) -> torch.Tensor:
    return ((starts.diff() - 1).clamp(min=0) * page + last).to(torch.int32)


class Decode(Wrapper):
    def plan(self, starts: Any, pages: Any, last: Any, *shape: int, **types: Any) -> None:
        self.keep(_paged_kv_indptr_buf=starts, _paged_kv_last_page_len_buf=last)
        self.keep(_paged_kv_indices_buf=pages)
        self.take(starts, last, *shape, **types)

    def take(self, starts: Any, last: Any, *shape: int, sm_scale: float, **_types: Any) -> None:
        self._page, self._scale = shape[-1], sm_scale
        rows = torch.arange(len(last) + 1, dtype=torch.int32)
        self._qo_indptr_buf = rows
        self.check(rows, starts, lens_of(starts, last, self._page))

    def run(self, q_RHd: torch.Tensor, caches: Any, *, out: torch.Tensor) -> None:
        assert len(q_RHd) == len(self._lens) == len(out), (len(q_RHd), len(self._lens))
        for row in range(len(q_RHd)):
            own, kept = slice(row, row + 1), self.pages_of(caches, row)
            out[own] = attend(q_RHd[own], *kept, self._scale, causal=False)


def fast_decode_plan(
    wrapper: Decode,
    starts: torch.Tensor,
    pages: torch.Tensor,
    last: torch.Tensor,
    *shape: int,
    global_override_indptr_cpu: torch.Tensor,
    **types: Any,
) -> None:
    """Plan without a copy of the lists: those of a graph are in their buffers already."""
    if wrapper._in_graph:
        assert starts.data_ptr() == wrapper._paged_kv_indptr_buf.data_ptr()
        assert len(pages) <= len(wrapper._paged_kv_indices_buf)
    else:
        wrapper.keep(_paged_kv_indptr_buf=starts, _paged_kv_indices_buf=pages)
        wrapper.keep(_paged_kv_last_page_len_buf=last)
    wrapper.take(global_override_indptr_cpu, last, *shape, **types)


class PagedPrefill(Wrapper):
    def plan(
        self,
        starts: torch.Tensor,
        first: torch.Tensor,
        pages: torch.Tensor,
        last: torch.Tensor,
        *shape: int,
        causal: bool,
        sm_scale: float,
        **_types: Any,
    ) -> None:
        self._page, self._causal, self._scale = shape[-1], causal, sm_scale
        self.keep(_qo_indptr_buf=starts, _paged_kv_indptr_buf=first)
        self.keep(_paged_kv_indices_buf=pages, _paged_kv_last_page_len_buf=last)
        self.check(starts, first, lens_of(first, last, self._page))
        self._cached_module, self._plan_info = SimpleNamespace(plan=self.plan_module), [0]

    def plan_module(self, *arguments: Any) -> list[int]:
        """What flashinfer's own plan calls last; the buffers hold the lists already."""
        assert len(arguments) == {"fa2": 19, "fa3": 16}[self._backend]
        starts, first, lens_B, _total, batch_size, *_shape, page = arguments[3:11]
        assert batch_size == len(lens_B) and page == self._page
        self._causal = arguments[14]
        self.check(starts, first, lens_B)
        return [1]

    def run(self, q_RHd: torch.Tensor, caches: Any, *, out: torch.Tensor) -> None:
        starts = self._qo_indptr_buf.tolist()
        for seq in range(len(starts) - 1):
            own = slice(starts[seq], starts[seq + 1])
            if own.start < own.stop:
                kept = self.pages_of(caches, seq)
                out[own] = attend(q_RHd[own], *kept, self._scale, causal=self._causal)


class Ragged(Wrapper):
    """Of new prompts, which attend to their own rows alone."""

    def plan(
        self,
        starts: Any,
        kv_starts: Any,
        *_shape: int,
        sm_scale: float,
        causal: bool,
        **_types: Any,
    ) -> None:
        self._scale, self._causal = sm_scale, causal
        self.check(starts, kv_starts, kv_starts.diff())

    def run(
        self, q_RHd: torch.Tensor, k_Lhd: torch.Tensor, v_Lhd: torch.Tensor, *, out: torch.Tensor
    ) -> None:
        for first, end in zip(self._starts, self._starts[1:], strict=False):
            if first < end:
                new = (it[first:end] for it in (q_RHd, k_Lhd, v_Lhd))
                out[first:end] = attend(*new, self._scale, causal=self._causal)


FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Decode,
    BatchPrefillWithPagedKVCacheWrapper=PagedPrefill,
    BatchPrefillWithRaggedKVCacheWrapper=Ragged,
    fast_decode_plan=fast_decode_plan,
)


def use_flashinfer(patches: pytest.MonkeyPatch) -> None:
    """Let the backend take small models of float32 on a CPU, as on Hopper, with graphs for new prompts of few rows."""
    patches.setitem(sys.modules, "flashinfer", FLASHINFER)
    patches.setattr(flashinfer, "DTYPES", (torch.float32,))
    patches.setattr(flashinfer, "HEAD_DIMS", (16, 32, 64))
    patches.setattr(flashinfer, "NEW_PROMPT_ROWS", 8)
    patches.setattr(flashinfer, "on_hopper", lambda device: True)
    bind = FlashInferAttention.bind

    def bind_new_prompts(self: FlashInferAttention, kv_caches: Any) -> None:
        """As with bfloat16."""
        bind(self, kv_caches)
        self._has_new_prompts = bool(kv_caches)
        for plans in self._eager:
            plans._new_prompts = Ragged(torch.zeros(1, dtype=torch.uint8), "fa3")

    # The fused kernel takes a norm's weight as on a GPU; on a CPU there is a factor in it.
    for name, value in (
        ("devices", ("cpu",)),
        ("unavailable", classmethod(lambda cls, device: None)),
        ("compile_kernels", classmethod(lambda *_: None)),
        ("bind", bind_new_prompts),
        ("fused_store", False),
    ):
        patches.setattr(FlashInferAttention, name, value)
