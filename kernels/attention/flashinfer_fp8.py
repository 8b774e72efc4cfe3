"""Attention over a cache in e4m3 on Hopper GPUs: decodes by our kernel, prompts by flashinfer's FlashAttention 3.

FlashAttention 3 reads K and V in e4m3 only with q in e4m3, and without a scale for each token. So prompts without
computed tokens read the new rows, which are rounded as the cache is, and other prompts read their sequences expanded to
bfloat16: that takes 3 bytes of traffic a value, and contiguous rows are faster to read than pages. Sequences that the
buffer has no room for run in tiles of our own kernel. Decodes can be captured in CUDA graphs, prompts cannot.

T tokens, H query heads, h KV heads, M = H + 2h, N = H + h, d head dim, r rotated values of a head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.attention.base import AttentionBatch, GraphForm
from kernels.attention.flashinfer import HEAD_DIMS, FlashInferAttention
from kernels.attention.flashinfer_decodes import Pages, prompts_are_new
from kernels.attention.flashinfer_modules import Wanted, compile_missing, modules
from kernels.attention.triton_paged import TritonPagedAttention
from kernels.host.hopper import on_hopper
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.pending import wait_previous_ubatch

EXPANDED_BYTES = 128 * 2**20  # of K and V that are expanded at a time
WORKSPACE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class _Expanded:
    """Pages to expand: their list, the row of each page's first token and the row behind its sequence, all rows."""

    pages: torch.Tensor
    firsts: torch.Tensor
    ends: torch.Tensor
    num_rows: int


class FlashInferFp8Attention(TritonPagedAttention):
    """Decodes as in `triton`; the sequences behind them by FlashAttention 3 as far as they fit, the rest in tiles."""

    name = "flashinfer_fp8"
    auto = "reads an FP8 cache: decodes by our kernel, prompts expanded for FlashAttention 3"
    fused_store = True
    windows = sinks = mixed_graph = False
    shortens = True
    distributions = ("flashinfer-python", "triton")

    def __init__(self, specs: Sequence[AttentionSpec], block_size: int):
        super().__init__(specs, block_size)
        import flashinfer

        from kernels.triton.expand_fp8 import expand_fp8
        from kernels.triton.paged import list_pages
        from kernels.triton.qk_rope import norm_rotate_store

        self._flashinfer: Any = flashinfer
        self._expand, self._list_pages = expand_fp8, list_pages
        self._norm_rotate_store = norm_rotate_store
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None  # expanded K and V
        self._prompt_rows = slice(0, 0)  # of FlashAttention 3
        self._expanded: _Expanded | None = None
        self._wrapper: Any = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if not on_hopper(device):
            return "it needs a Hopper GPU, for FlashAttention 3"
        return super().unavailable(device) or FlashInferAttention.unavailable(device)

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if reason := super().unsupported_reason(shape):
            return reason
        if shape.dtype != torch.bfloat16:
            return f"it computes in bfloat16, model.dtype is {shape.dtype_name}"
        for spec in shape.attention_specs:
            if not spec.fp8_cache:
                return "it reads K and V in e4m3 alone, cache.dtype is not fp8"
            if spec != shape.attention_specs[0]:
                return "it takes layers with equal attention"
            if spec.head_dim not in HEAD_DIMS:
                return f"it takes a head_dim of {', '.join(map(str, HEAD_DIMS))}, the model's is {spec.head_dim}"
        return None

    @classmethod
    def auto_reason(cls, shape: BackendShape) -> str | None:
        """See Backend. It is for caches in e4m3 alone."""
        return cls.auto if any(spec.fp8_cache for spec in shape.attention_specs) else None

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        return EXPANDED_BYTES + WORKSPACE_BYTES

    @classmethod
    def compile_kernels(cls, dtype: torch.dtype, specs: Iterable[AttentionSpec]) -> None:
        head_dims = sorted({spec.head_dim for spec in specs})
        compile_missing(_fa3(modules(dtype, head_dim)) for head_dim in head_dims)

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Also compile FlashAttention 3, if this machine has not done so before (a minute)."""
        super().bind(kv_caches)
        if not kv_caches or self._wrapper is not None:
            return
        self.compile_kernels(torch.bfloat16, self.specs)
        spec = self.specs[0]
        heads = spec.num_kv_heads, spec.head_dim
        num_rows = EXPANDED_BYTES // (2 * 2 * spec.num_kv_heads * spec.head_dim)
        # Zeros, because a kernel multiplies rows behind a sequence by 0.
        rows = torch.zeros(2, num_rows, *heads, dtype=torch.bfloat16, device=self._device)
        self._rows = rows[0], rows[1]
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        ragged = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        self._wrapper = ragged(workspace, backend="fa3")
        self._plan_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        one = np.arange(2, dtype=np.int32)
        self._plan_wrapper(one, one)

    def _first_in_tiles(self, batch: AttentionBatch) -> int:
        """The first sequence that is not for FlashAttention 3."""
        if prompts_are_new(batch):
            return batch.num_seqs
        assert self._rows is not None, "bind comes first"
        ends = np.cumsum(batch.seq_lens_cpu[batch.num_single_rows :], dtype=np.int64)
        fitting = int(np.searchsorted(ends, len(self._rows[0]), side="right"))
        return batch.num_single_rows + fitting

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        seqs = slice(batch.num_single_rows, self._first_in_tiles(batch))
        starts = batch.query_start_loc_cpu[seqs.start : seqs.stop + 1]
        self._prompt_rows, self._expanded = slice(int(starts[0]), int(starts[-1])), None
        if seqs.start == seqs.stop:
            return
        key_starts = starts - starts[0]
        if not prompts_are_new(batch):
            key_starts = np.zeros(len(starts), np.int32)
            np.cumsum(batch.seq_lens_cpu[seqs], out=key_starts[1:])
            self._expanded = self._plan_expansion(batch, seqs, key_starts)
        self._plan_wrapper(starts - starts[0], key_starts)

    def _plan_expansion(
        self, batch: AttentionBatch, seqs: slice, key_starts: np.ndarray
    ) -> _Expanded:
        size = self.block_size
        pages = Pages(batch.seq_lens_cpu[seqs], size)
        pages.ship(torch.empty(pages.total, dtype=torch.int32, device=self._device))
        self._list_pages(batch.block_table[seqs], pages.starts, pages.pages)
        starts = pages.starts_cpu.numpy()
        counts = np.diff(starts)
        number = np.arange(pages.total, dtype=np.int32) - np.repeat(starts[:-1], counts)
        rows = np.repeat(key_starts[:-1], counts) + number * np.int32(size)
        bounds = np.stack((rows, np.repeat(key_starts[1:], counts)))
        firsts, ends = torch.from_numpy(bounds).to(self._device)
        return _Expanded(pages.pages, firsts, ends, int(key_starts[-1]))

    def _plan_wrapper(self, starts: np.ndarray, key_starts: np.ndarray) -> None:
        spec = self.specs[0]
        # Schedules are copied to the device from pinned memory that this plan overwrites.
        self._plan_copied.synchronize()
        self._wrapper.plan(
            torch.from_numpy(starts),
            torch.from_numpy(key_starts),
            *(spec.num_heads, spec.num_kv_heads, spec.head_dim),
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            sm_scale=spec.scale,
        )
        self._plan_copied.record()

    def plan_graph(self, batch: AttentionBatch, num_rows: int, form: GraphForm) -> None:
        super().plan_graph(batch, num_rows, form)
        self._prompt_rows, self._expanded = slice(0, 0), None

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
        return self._attend_all(q_THd, k_Thd, v_Thd, layer)

    def store(
        self,
        qkv_TMd: torch.Tensor,
        layer: int,
        rotation_T1r: torch.Tensor | None = None,
        norm_Nd: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        slots, caches = self.layers[None].slots, self._caches[layer]
        self._norm_rotate_store(qkv_TMd, norm_Nd, eps, rotation_T1r, slots, *caches)
        wait_previous_ubatch()

    def attend(
        self, qkv_TMd: torch.Tensor, layer: int, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        spec = self.specs[layer]
        counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q_THd, k_Thd, v_Thd = qkv_TMd.split_with_sizes(counts, 1)
        return self._attend_all(q_THd, k_Thd, v_Thd, layer)

    def _attend_all(
        self, q_THd: torch.Tensor, k_Thd: torch.Tensor, v_Thd: torch.Tensor, layer: int
    ) -> torch.Tensor:
        out_THd = self._attend(q_THd, layer, None)
        rows, expanded = self._prompt_rows, self._expanded
        if rows.start == rows.stop:
            return out_THd
        k_Lhd, v_Lhd = k_Thd[rows], v_Thd[rows]
        if expanded is not None:
            assert self._rows is not None
            bounds = (expanded.pages, expanded.firsts, expanded.ends)
            self._expand(self._caches[layer], *bounds, *self._rows)
            k_Lhd, v_Lhd = (of[: expanded.num_rows] for of in self._rows)
        self._wrapper.run(q_THd[rows], k_Lhd, v_Lhd, out=out_THd[rows])
        return out_THd


def _fa3(found: Sequence[Wanted]) -> Wanted:
    """Return the module of FlashAttention 3, which is the last one."""
    return found[-1]
