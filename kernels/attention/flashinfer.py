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
INT_WORKSPACE_BYTES = 2**20


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

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        import flashinfer

        from kernels.triton.paged import list_pages, store_kv
        from kernels.triton.qk_rope import norm_rotate_store

        self._flashinfer: Any = flashinfer
        self._list_pages, self._store_kv = list_pages, store_kv
        self._norm_rotate_store = norm_rotate_store
        self._num_rows = self._num_tokens = self._num_decodes = 0
        self._graph: _DecodeGraph | None = None

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Also compiles flashinfer's kernels, where this machine has not done so before (a minute)."""
        super().bind(kv_caches)
        cache = kv_caches[0]
        assert cache.dtype in DTYPES and self.spec.head_dim in HEAD_DIMS, (cache.dtype, self.spec)
        self._device, self._dtype = cache.device, cache.dtype
        self._slots = torch.empty(0, dtype=torch.int64, device=self._device)
        properties = torch.cuda.get_device_properties(self._device)
        self._splits = BLOCKS_PER_SM * properties.multi_processor_count // self.spec.num_kv_heads
        hopper = properties.major == 9
        tiles = max(_decode_tile(self.spec), 0 if hopper else PREFILL_TILE)
        self._workspace = self._empty_workspace(self._splits, tiles)
        self._decode = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, use_tensor_cores=True
        )
        self._prefill = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, backend="fa3" if hopper else "fa2"
        )
        self._planned = torch.cuda.Event()
        self._graphs: dict[int, _DecodeGraph] = {}
        self._compile()

    def _compile(self) -> None:
        """Plan one token both ways, each in a thread: what is missing is compiled side by side."""
        starts = torch.tensor([0, 1], dtype=torch.int32)
        lens = torch.ones(1, dtype=torch.int32)
        pages = torch.zeros(1, dtype=torch.int32, device=self._device)

        def plan(decodes: bool) -> None:
            with torch.cuda.device(self._device):
                if decodes:
                    self._plan_decodes(starts, pages, lens)
                else:
                    self._plan_extends(starts, starts, pages, lens)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(plan, (True, False)))
        torch.cuda.synchronize(self._device)

    def plan(self, batch: AttentionBatch) -> None:
        self._graph = None
        self._num_tokens, self._num_decodes = batch.num_tokens, batch.num_decodes
        self._slots = batch.slot_mapping
        if not batch.num_seqs:
            return
        # Plans travel from pinned memory that the next one overwrites.
        self._planned.synchronize()
        starts, last_lens = _page_starts(batch.seq_lens_cpu, self.spec.block_size)
        pages = torch.empty(int(starts[-1]), dtype=torch.int32, device=self._device)
        table = batch.block_table[: batch.num_seqs]
        self._list_pages(table, starts.to(self._device, non_blocking=True), pages)
        split, num_pages = batch.num_decodes, int(starts[batch.num_decodes])
        if split:
            self._plan_decodes(starts[: split + 1], pages[:num_pages], last_lens[:split])
        if split < batch.num_seqs:
            queries = torch.from_numpy(batch.query_start_loc_cpu[split:]) - split
            self._plan_extends(
                queries, starts[split:] - num_pages, pages[num_pages:], last_lens[split:]
            )
        self._planned.record()

    def _plan_decodes(
        self, starts: torch.Tensor, pages: torch.Tensor, last_lens: torch.Tensor
    ) -> None:
        self._decode.plan(starts, pages, last_lens, *self._shape(), **self._types())

    def _plan_extends(
        self,
        queries: torch.Tensor,
        starts: torch.Tensor,
        pages: torch.Tensor,
        last_lens: torch.Tensor,
    ) -> None:
        self._prefill.plan(
            queries, starts, pages, last_lens, *self._shape(), causal=True, **self._types()
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
        self._store_kv(k_Thd, v_Thd, self._slots, self.kv_caches[layer])
        return self.attend(q_THd, layer)

    def norm_rotate_store(
        self,
        qkv_TMd: torch.Tensor,
        weight_Nd: torch.Tensor,
        eps: float,
        rotation_T1d: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """In one kernel, what a model does between projection and attention. Returns q_THd for `attend`.

        qkv [T, H + 2h, d] is overwritten; weight [H + h, d]; rotation complex64 [T, 1, d/2] of interleaved pairs.
        """
        cache = self.kv_caches[layer]
        return self._norm_rotate_store(qkv_TMd, weight_Nd, eps, rotation_T1d, self._slots, cache)

    def attend(self, q_THd: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention over a cache that has the new K and V already: o_THd, new and contiguous."""
        cache = self.kv_caches[layer]
        pages = (cache[0], cache[1])
        out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
        if self._graph is not None:
            assert len(q_THd) == self._graph.num_rows, (len(q_THd), self._graph.num_rows)
            return self._graph.wrapper.run(q_THd, pages, out=out_THd)
        split, end = self._num_decodes, self._num_tokens
        if split:
            self._decode.run(q_THd[:split], pages, out=out_THd[:split])
        if split < end:
            self._prefill.run(q_THd[split:end], pages, out=out_THd[split:end])
        if end < len(q_THd):
            out_THd[end:] = 0
        return out_THd

    def reserve_graphs(self, max_rows: int, max_blocks: int) -> None:
        """Buffers for graphs of up to `max_rows` decodes of up to `max_blocks` blocks each; before any capture."""
        assert not self._graphs, "captured graphs point into the buffers there are"
        spec, tile = self.spec, _decode_tile(self.spec)
        # flashinfer's bound on the tiles of a graph's rows, which does not know that each has one token
        num_tiles = -(-max_rows * (spec.num_heads // spec.num_kv_heads) // tile) + max_rows
        self._graph_workspace = self._empty_workspace(max(num_tiles, self._splits), tile)
        self._buffers = _GraphBuffers(max_rows, max_rows * max_blocks, self._device)

    def plan_graph(self, batch: AttentionBatch, num_rows: int) -> None:
        """Plan decodes for a graph of `num_rows` rows, of which the batch may leave the last ones empty.

        Every address and launch shape is that of the graph's capture; K and V of empty rows go nowhere, their output
        is zero.
        """
        assert batch.num_decodes == batch.num_seqs == batch.num_tokens <= num_rows
        self._planned.synchronize()
        graph = self._graphs.get(num_rows)
        if graph is None:
            graph = self._graphs[num_rows] = self._new_graph(num_rows)
        self._graph, self._slots = graph, self._buffers.slots[:num_rows]
        starts, last_lens = _page_starts(batch.seq_lens_cpu, self.spec.block_size, num_rows)
        self._buffers.fill(batch, starts, last_lens, self._list_pages)
        graph.plan(starts, last_lens, self._buffers, *self._shape(), **self._types())
        self._planned.record()

    def _new_graph(self, num_rows: int) -> "_DecodeGraph":
        buffers = self._buffers
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._graph_workspace,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers.starts[: num_rows + 1],
            paged_kv_indices_buffer=buffers.pages,
            paged_kv_last_page_len_buffer=buffers.last_lens[:num_rows],
        )
        wrapper.reset_workspace_buffer(self._graph_workspace, buffers.int_workspace)
        return _DecodeGraph(wrapper, num_rows, self._flashinfer.fast_decode_plan)

    def _empty_workspace(self, num_splits: int, tile: int) -> torch.Tensor:
        """Partial results of sequences that are split: float32 [splits, tile, H, d + 1], and some slack."""
        spec = self.spec
        num_bytes = num_splits * tile * spec.num_heads * (spec.head_dim + 1) * 4 + 2**20
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


class _GraphBuffers:
    """What all graphs of decodes read, at fixed addresses. Graphs run one after the other, so they share it."""

    def __init__(self, max_rows: int, max_pages: int, device: torch.device):
        self.starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.pages = torch.zeros(max_pages, dtype=torch.int32, device=device)
        self.last_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self.int_workspace = torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def fill(
        self, batch: AttentionBatch, starts: torch.Tensor, last_lens: torch.Tensor, list_pages: Any
    ) -> None:
        num_rows, num_seqs = len(last_lens), batch.num_seqs
        assert int(starts[-1]) <= len(self.pages), "reserve_graphs was given fewer blocks"
        self.starts[: num_rows + 1].copy_(starts, non_blocking=True)
        self.last_lens[:num_rows].copy_(last_lens, non_blocking=True)
        self.slots[:num_seqs].copy_(batch.slot_mapping)
        self.slots[num_seqs:num_rows] = -1
        list_pages(batch.block_table[:num_seqs], self.starts[: num_seqs + 1], self.pages)


class _DecodeGraph:
    """flashinfer's plan for one size of graph."""

    def __init__(self, wrapper: Any, num_rows: int, fast_plan: Any):
        self.wrapper, self.num_rows = wrapper, num_rows
        self._fast_plan, self._planned = fast_plan, False

    def plan(
        self,
        starts: torch.Tensor,
        last_lens: torch.Tensor,
        buffers: _GraphBuffers,
        *shape: int,
        **types: Any,
    ) -> None:
        pages = buffers.pages[: int(starts[-1])]
        if not self._planned:
            self.wrapper.plan(starts, pages, last_lens, *shape, **types)
            self._planned = True
            return
        # The buffers are filled: this writes the schedule only.
        self._fast_plan(
            self.wrapper,
            starts,
            pages,
            last_lens,
            *shape,
            global_override_indptr_cpu=starts,
            **types,
        )


def _page_starts(
    seq_lens_cpu: np.ndarray, block_size: int, num_rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 on the host: where each sequence's pages start [B + 1], tokens in its last page [B].

    With num_rows, B grows to it by sequences without tokens.
    """
    num_seqs = len(seq_lens_cpu)
    num_rows = num_seqs if num_rows is None else num_rows
    num_pages = -(-seq_lens_cpu // block_size)
    starts, last_lens = np.zeros(num_rows + 1, np.int32), np.zeros(num_rows, np.int32)
    np.cumsum(num_pages, out=starts[1 : num_seqs + 1])
    starts[num_seqs + 1 :] = starts[num_seqs]
    last_lens[:num_seqs] = seq_lens_cpu - (num_pages - 1) * block_size
    return torch.from_numpy(starts), torch.from_numpy(last_lens)


def _decode_tile(spec: AttentionSpec) -> int:
    group = spec.num_heads // spec.num_kv_heads
    return next(tile for tile in DECODE_TILES if tile >= group or tile == DECODE_TILES[-1])
