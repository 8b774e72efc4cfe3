"""Attention by flashinfer over the paged KV cache: decodes and new prompts, planned once a step. 16-bit floats on GPUs.

Decodes run on its tensor-core decode, which keeps the query heads that share a KV head in one tile; other sequences on
its prefill kernels (FlashAttention 3 on Hopper, 2 elsewhere). The block table becomes flashinfer's list of pages on the
device, so a plan waits for nothing. Decodes can also be planned for a CUDA graph: `reserve_graphs` once, then
`plan_graph` before the capture and before each replay of a size.

T tokens, H query heads, h KV heads, d head dim, B sequences.
"""

import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from kernels.attention.base import Attention, AttentionBatch, AttentionSpec

MIN_VERSION = (0, 6, 6)
MIN_CAPABILITY = (8, 0)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# Rows of a tile of query heads times query tokens: of a decode (by how many heads share a KV head), of a prompt.
DECODE_TILES = (16, 64, 128)
PREFILL_TILE = 128
# Blocks a multiprocessor that flashinfer aims at when it splits long sequences.
BLOCKS_PER_SM = 2
# Of a graph's schedule; some 30 bytes a row are used.
SCHEDULE_BYTES = 2**20


def flashinfer_missing(device: torch.device) -> str | None:
    """Why flashinfer cannot run with this GPU at all, or None. Imports nothing of it."""
    needed = ".".join(map(str, MIN_VERSION))
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return f"flashinfer-python is not installed, {needed} or newer is needed"
    if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < MIN_VERSION:
        return f"flashinfer-python {found} is installed, {needed} or newer is needed"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return "it needs compute capability {}.{}, found {}.{}".format(*MIN_CAPABILITY, *capability)
    for package, what in (("triton", "kernels beside it"), ("tvm_ffi", "calls")):
        if find_spec(package) is None:
            return f"{package} is not installed, which its {what} need"
    if find_spec("flashinfer_jit_cache") is None and _nvcc() is None:
        return "no nvcc was found to compile its kernels with (set CUDA_HOME), nor flashinfer-jit-cache"
    return None


def shape_obstacle(dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Why it cannot run a model of this dtype and head dim, or None."""
    if dtype not in DTYPES:
        return f"it computes in float16 or bfloat16, model.dtype is {str(dtype)[6:]}"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"it takes a head_dim of {', '.join(map(str, HEAD_DIMS))}, the model's is {head_dim}"
    return None


def _nvcc() -> str | None:
    """Where flashinfer looks for the compiler."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=os.path.join(home, "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


class FlashInferAttention(Attention):
    """Prefill and decode wrappers over one workspace; one instance plans for one forward at a time."""

    name = "flashinfer"
    fuses_qk_norm = True

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        import flashinfer

        from kernels.triton.paged import list_pages, store_kv
        from kernels.triton.qk_rope import norm_rotate_store

        self._flashinfer: Any = flashinfer
        self._list_pages, self._store_kv = list_pages, store_kv
        self._norm_rotate_store = norm_rotate_store
        self._num_rows = self._num_tokens = self._num_decodes = 0
        self._graph_rows: int | None = None

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Also compiles flashinfer's kernels, where this machine has not done so before (minutes)."""
        super().bind(kv_caches)
        cache = kv_caches[0]
        assert cache.dtype in DTYPES and self.spec.head_dim in HEAD_DIMS, (cache.dtype, self.spec)
        self._layers = [(cache[0], cache[1]) for cache in kv_caches]
        self._device, self._dtype = cache.device, cache.dtype
        self._slots = torch.empty(0, dtype=torch.int64, device=self._device)
        properties = torch.cuda.get_device_properties(self._device)
        self._splits = BLOCKS_PER_SM * properties.multi_processor_count // self.spec.num_kv_heads
        hopper = properties.major == 9
        tile = max(_decode_tile(self.spec), 0 if hopper else PREFILL_TILE)
        workspace = self._empty_workspace(self._splits, tile)
        decode = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, use_tensor_cores=True
        )
        self._decode = _Decodes(decode, self._flashinfer.fast_decode_plan)
        self._prefill = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, backend="fa3" if hopper else "fa2"
        )
        self._planned = torch.cuda.Event()
        self._graphs: dict[int, _Decodes] = {}
        self._compile()

    def _compile(self) -> None:
        """Plan one token both ways, each in a thread: what is missing is compiled side by side."""
        pages = _Pages(np.ones(1, dtype=np.int32), self.spec.block_size)
        pages.ship(torch.zeros(1, dtype=torch.int32, device=self._device))

        def plan(decodes: bool) -> None:
            with torch.cuda.device(self._device):
                if decodes:
                    self._plan_decodes(pages, 1)
                else:
                    self._plan_extends(pages, 0, np.arange(2, dtype=np.int32))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(plan, (True, False)))
        torch.cuda.synchronize(self._device)

    def plan(self, batch: AttentionBatch) -> None:
        self._graph_rows = None
        self._num_tokens, self._num_decodes = batch.num_tokens, batch.num_decodes
        self._slots = batch.slot_mapping
        if not batch.num_seqs:
            return
        # Schedules travel from pinned memory that this plan overwrites.
        self._planned.synchronize()
        pages = _Pages(batch.seq_lens_cpu, self.spec.block_size)
        pages.ship(torch.empty(pages.total, dtype=torch.int32, device=self._device))
        self._list_pages(batch.block_table[: batch.num_seqs], pages.starts, pages.pages)
        if batch.num_decodes:
            self._plan_decodes(pages, batch.num_decodes)
        if batch.num_decodes < batch.num_seqs:
            self._plan_extends(pages, batch.num_decodes, batch.query_start_loc_cpu)
        self._planned.record()

    def _plan_decodes(self, pages: "_Pages", num_decodes: int) -> None:
        self._decode.plan(pages, num_decodes, *self._shape(), **self._types())

    def _plan_extends(self, pages: "_Pages", first: int, query_start_loc: np.ndarray) -> None:
        """Sequences from `first` on, the earlier ones having a token each."""
        first_page = int(pages.starts_cpu[first])
        self._prefill.plan(
            torch.from_numpy(query_start_loc[first:] - np.int32(first)),
            pages.starts_cpu[first:] - first_page,
            pages.pages[first_page:],
            pages.last_lens_cpu[first:],
            *self._shape(),
            causal=True,
            **self._types(),
        )

    def _shape(self) -> tuple[int, int, int, int]:
        spec = self.spec
        return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size

    def _types(self) -> dict[str, Any]:
        dtype = self._dtype
        return {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": self.spec.scale}

    def __call__(
        self, q_THd: torch.Tensor, k_Thd: torch.Tensor, v_Thd: torch.Tensor, layer: int
    ) -> torch.Tensor:
        self._store_kv(k_Thd, v_Thd, self._slots, *self._layers[layer])
        return self.attend(q_THd, layer)

    def norm_rotate_store(
        self,
        qkv_TMd: torch.Tensor,
        weight_Nd: torch.Tensor,
        eps: float,
        rotation_T1d: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        caches = self._layers[layer]
        return self._norm_rotate_store(qkv_TMd, weight_Nd, eps, rotation_T1d, self._slots, *caches)

    def attend(self, q_THd: torch.Tensor, layer: int) -> torch.Tensor:
        caches = self._layers[layer]
        out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
        if self._graph_rows is not None:
            assert len(q_THd) == self._graph_rows, (len(q_THd), self._graph_rows)
            return self._graphs[self._graph_rows].wrapper.run(q_THd, caches, out=out_THd)
        split, end = self._num_decodes, self._num_tokens
        if split:
            self._decode.wrapper.run(q_THd[:split], caches, out=out_THd[:split])
        if split < end:
            self._prefill.run(q_THd[split:end], caches, out=out_THd[split:end])
        if end < len(q_THd):
            out_THd[end:] = 0
        return out_THd

    def reserve_graphs(self, max_rows: int, max_blocks: int) -> None:
        """Buffers for graphs of up to `max_rows` decodes of up to `max_blocks` blocks each; before any capture."""
        assert not self._graphs, "captured graphs point into the buffers there are"
        spec, tile = self.spec, _decode_tile(self.spec)
        # flashinfer's bound on the tiles of a graph's rows, which does not know that each has one token
        num_tiles = -(-max_rows * (spec.num_heads // spec.num_kv_heads) // tile) + max_rows
        workspace = self._empty_workspace(max(num_tiles, self._splits), tile)
        self._buffers = _GraphBuffers(max_rows, max_rows * max_blocks, workspace)

    def plan_graph(self, batch: AttentionBatch, num_rows: int) -> None:
        """Plan decodes for a graph of `num_rows` rows, of which the batch may leave the last ones empty.

        Every address and launch shape is that of the graph's capture; K and V of empty rows go nowhere, their output
        is zero.
        """
        assert batch.num_decodes == batch.num_seqs == batch.num_tokens <= num_rows
        self._planned.synchronize()
        buffers = self._buffers
        if num_rows not in self._graphs:
            wrapper = buffers.wrapper(self._flashinfer, num_rows)
            self._graphs[num_rows] = _Decodes(wrapper, self._flashinfer.fast_decode_plan)
        self._graph_rows, self._slots = num_rows, buffers.slots[:num_rows]
        pages = _Pages(batch.seq_lens_cpu, self.spec.block_size, num_rows)
        assert pages.total <= len(buffers.pages), "reserve_graphs was given fewer blocks"
        pages.ship(buffers.pages, buffers.lengths)
        table = batch.block_table[: batch.num_seqs]
        self._list_pages(table, pages.starts, pages.pages, batch.slot_mapping, self._slots)
        self._graphs[num_rows].plan(pages, num_rows, *self._shape(), **self._types())
        self._planned.record()

    def _empty_workspace(self, num_splits: int, tile: int) -> torch.Tensor:
        """Partial results of sequences that are split: float32 [splits, tile, H, d + 1], and some slack."""
        spec = self.spec
        num_bytes = num_splits * tile * spec.num_heads * (spec.head_dim + 1) * 4 + 2**20
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


class _Pages:
    """Which pages each sequence has, as flashinfer reads it, on the host and (after `ship`) on the device.

    starts     int32 [R + 1]  where each sequence's entries of `pages` start; rows without a sequence have none
    last_lens  int32 [R]      tokens in each one's last page
    pages      int32 [>= total]
    """

    def __init__(self, seq_lens_cpu: np.ndarray, block_size: int, num_rows: int | None = None):
        num_seqs = len(seq_lens_cpu)
        self.num_rows = num_seqs if num_rows is None else num_rows
        num_pages = -(-seq_lens_cpu // block_size)
        lengths = np.zeros(2 * self.num_rows + 1, np.int32)
        starts, last_lens = lengths[: self.num_rows + 1], lengths[self.num_rows + 1 :]
        np.cumsum(num_pages, out=starts[1 : num_seqs + 1])
        starts[num_seqs + 1 :] = starts[num_seqs]
        last_lens[:num_seqs] = seq_lens_cpu - (num_pages - 1) * block_size
        self.total = int(starts[-1])
        self._lengths_cpu = torch.from_numpy(lengths)
        self.starts_cpu, self.last_lens_cpu = self._halves(self._lengths_cpu)

    def ship(self, pages: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        """Start the copy to the device: into `lengths` [>= 2R + 1], or new tensors. `pages` is still to be filled."""
        count = 2 * self.num_rows + 1
        if lengths is None:
            lengths = torch.empty(count, dtype=torch.int32, device=pages.device)
        lengths[:count].copy_(self._lengths_cpu, non_blocking=True)
        self.pages = pages
        self.starts, self.last_lens = self._halves(lengths[:count])

    def _halves(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return lengths[: self.num_rows + 1], lengths[self.num_rows + 1 :]


class _Decodes:
    """A decode wrapper of flashinfer and how it is planned."""

    def __init__(self, wrapper: Any, fast_plan: Any):
        self.wrapper = wrapper
        self._fast_plan, self._planned = fast_plan, False

    def plan(self, pages: _Pages, num_decodes: int, *shape: int, **types: Any) -> None:
        """The first `num_decodes` rows; those of a graph are as many as it was made for."""
        starts_cpu = pages.starts_cpu[: num_decodes + 1]
        last_lens_cpu = pages.last_lens_cpu[:num_decodes]
        used = pages.pages[: int(starts_cpu[-1])]
        if not self._planned:
            self.wrapper.plan(starts_cpu, used, last_lens_cpu, *shape, **types)
            self._planned = True
            return
        # The wrapper's own plan looks at each length in Python, 2 us each. This one leaves copies to the device to us.
        starts, last_lens = pages.starts[: num_decodes + 1], pages.last_lens[:num_decodes]
        self._fast_plan(
            self.wrapper,
            starts,
            used,
            last_lens_cpu,
            *shape,
            global_override_indptr_cpu=starts_cpu,
            **types,
        )
        self.wrapper._paged_kv_last_page_len_buf = last_lens


class _GraphBuffers:
    """What all graphs of decodes read, at fixed addresses. Graphs run one after the other, so they share it."""

    def __init__(self, max_rows: int, max_pages: int, workspace: torch.Tensor):
        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=workspace.device)

        self.lengths = zeros(2 * max_rows + 1, torch.int32)
        self.pages = zeros(max_pages, torch.int32)
        self.slots = zeros(max_rows, torch.int64)
        self._workspace = workspace
        self._schedule = zeros(SCHEDULE_BYTES, torch.uint8)

    def wrapper(self, flashinfer: Any, num_rows: int) -> Any:
        """A wrapper for graphs of `num_rows` rows; its pinned memory is its own."""
        lengths = self.lengths[: 2 * num_rows + 1]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=lengths[: num_rows + 1],
            paged_kv_indices_buffer=self.pages,
            paged_kv_last_page_len_buffer=lengths[num_rows + 1 :],
        )
        wrapper.reset_workspace_buffer(self._workspace, self._schedule)
        return wrapper


def _decode_tile(spec: AttentionSpec) -> int:
    group = spec.num_heads // spec.num_kv_heads
    return next(tile for tile in DECODE_TILES if tile >= group or tile == DECODE_TILES[-1])
