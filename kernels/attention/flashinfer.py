"""Attention by flashinfer over the paged KV cache: decodes and new prompts, planned once a step. 16-bit floats on GPUs.

Decodes run on its tensor-core decode, which keeps the query heads that share a KV head in one tile; other sequences on
its prefill kernels (FlashAttention 3 on Hopper, 2 elsewhere). On Hopper prompts that are all new read K and V where the
projection left them, 14 to 30 % faster than out of pages; in bfloat16 alone, because a kernel's last tile of a prompt
multiplies the next one's V by 0, which in float16 may have overflowed. The block table becomes flashinfer's list of
pages on the device, so a plan waits for nothing. Forwards can also be planned for CUDA graphs, prompts on Hopper alone:
`reserve_graphs` once, then `plan_graph` before the capture and before each replay of a size.

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

from kernels.attention.base import AttentionBatch, GraphAttention, GraphForm
from kernels.attention.flashinfer_decodes import (
    ALIGNMENT_BYTES,
    Decodes,
    Pages,
    Shape,
    chunk_pages,
    plan_new_prompts,
    prompts_are_new,
)
from kernels.attention.flashinfer_graphs import GraphPlans, NewRows, Planned
from kernels.attention.flashinfer_modules import import_failure
from kernels.attention.spec import AttentionSpec
from kernels.backends.backend import BackendShape
from kernels.host.hopper import on_hopper
from kernels.pending import wait_previous_ubatch

MIN_VERSION = (0, 6, 6)
NEEDED_BESIDE = {
    "triton": "triton 3.4 or newer, for the kernels beside it",
    # What 0.6.6 and sgl-deep-gemm 0.1.4.post1 declare.
    "tvm_ffi": "apache-tvm-ffi from 0.1.6 to below 0.2, but 0.1.8 (beside DeepGEMM 0.1.11), for its calls",
}
MIN_CAPABILITY = (8, 0)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
PREFILL_TILE = 128  # rows of query heads times query tokens
# Blocks a multiprocessor that flashinfer aims at when it splits long sequences.
BLOCKS_PER_SM = 2
# Rows from which prompts that are all new get graphs of their own: there they save 1 % of a step and more.
NEW_PROMPT_ROWS = 1024
# For partial results of sequences that are cut, at least.
WORKSPACE_BYTES = 128 * 2**20


def _unavailable(device: torch.device) -> str | None:
    """Return what keeps flashinfer from running on this GPU, or None. Imports flashinfer where nothing else does."""
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
    for package, what in NEEDED_BESIDE.items():
        if find_spec(package) is None:
            return f"{package} is not installed; needed is {what}"
    if find_spec("flashinfer_jit_cache") is None and _nvcc() is None:
        return "no nvcc was found to compile its kernels with (set CUDA_HOME), nor flashinfer-jit-cache"
    if (said := import_failure()) is not None:
        return f"import flashinfer failed (flashinfer-python {found} is installed, {needed} or newer is needed): {said}"
    return None


def _nvcc() -> str | None:
    """Where flashinfer looks for the compiler."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=os.path.join(home, "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


class FlashInferAttention(GraphAttention):
    """Prefill and decode wrappers over one workspace; one instance plans for one forward at a time."""

    name = "flashinfer"
    devices = ("cuda",)
    auto = "reads the pages where they lie, planned once a step"
    fused_store = True
    distributions = ("flashinfer-python",)

    def __init__(self, specs: Sequence[AttentionSpec], block_size: int):
        super().__init__(specs, block_size)
        import flashinfer

        from kernels.triton.paged import list_pages, store_kv
        from kernels.triton.qk_rope import norm_rotate_store

        self.spec = specs[0]
        self._flashinfer: Any = flashinfer
        self._list_pages, self._store_kv = list_pages, store_kv
        self._norm_rotate_store = norm_rotate_store
        self._num_tokens = self._num_decodes = 0
        self._all_new = False
        self._plans: GraphPlans | None = None
        self._graph: Planned | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return _unavailable(device)

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        """Return the bytes of the workspace, which may be larger than this before Hopper."""
        return WORKSPACE_BYTES

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if shape.dtype not in DTYPES:
            return f"it computes in float16 or bfloat16, model.dtype is {shape.dtype_name}"
        specs = set(shape.attention_specs)
        head_dims = {spec.head_dim for spec in specs}
        if others := sorted(head_dims.difference(HEAD_DIMS)):
            known = ", ".join(map(str, HEAD_DIMS))
            return f"it takes a head_dim of {known}, the model's is {', '.join(map(str, others))}"
        if len(specs) > 1:
            return f"it plans for one attention of all layers, the model has {len(specs)}"
        return super().unsupported_reason(shape)

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Also compiles flashinfer's kernels, where this machine has not done so before (minutes)."""
        super().bind(kv_caches)
        self._layers = []
        if not kv_caches:
            return
        cache = kv_caches[0]
        assert cache.dtype in DTYPES and self.spec.head_dim in HEAD_DIMS, (cache.dtype, self.spec)
        self._layers = [(cache[0], cache[1]) for cache in kv_caches]
        self._device = cache.device
        self._slots = torch.empty(0, dtype=torch.int64, device=self._device)
        num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        num_blocks = BLOCKS_PER_SM * num_sms // self.spec.num_kv_heads
        shape = self._shape = Shape(self.spec, self.block_size, cache.dtype, num_blocks)
        hopper = self.mixed_graph = on_hopper(self._device)
        prefill_bytes = 0 if hopper else num_blocks * shape.chunk_bytes(PREFILL_TILE)
        decode_bytes = num_blocks * shape.chunk_bytes(shape.tile)
        size = max(prefill_bytes, decode_bytes, WORKSPACE_BYTES) + ALIGNMENT_BYTES
        workspace = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._max_chunks = (size - ALIGNMENT_BYTES) // shape.chunk_bytes(shape.tile)
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, use_tensor_cores=True
        )
        self._decode = Decodes(wrapper, self._flashinfer.fast_decode_plan)
        self._prefill = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, backend="fa3" if hopper else "fa2"
        )
        self._new_prompts = None
        if hopper and cache.dtype == torch.bfloat16:
            self._new_prompts = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                workspace, backend="fa3"
            )
        self._planned = torch.cuda.Event()
        self._plans = self._graph = None
        self._compile()

    def _compile(self) -> None:
        """Plan one token both ways, each in a thread: what is missing is compiled side by side."""
        pages = Pages(np.ones(1, dtype=np.int32), self.block_size)
        pages.ship(torch.zeros(1, dtype=torch.int32, device=self._device))

        inference = torch.is_inference_mode_enabled()

        def plan(decodes: bool) -> None:
            with torch.cuda.device(self._device), torch.inference_mode(inference):
                if decodes:
                    self._plan_decodes(pages, 1)
                else:
                    self._plan_extends(pages, 0, np.arange(2, dtype=np.int32))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(plan, (True, False)))
        torch.cuda.synchronize(self._device)

    def plan(self, batch: AttentionBatch) -> None:
        self._graph = None
        self._num_tokens, self._num_decodes = batch.num_tokens, batch.num_decodes
        self._slots = batch.slot_mapping
        if not batch.num_seqs:
            return
        # Schedules travel from pinned memory that this plan overwrites.
        self._planned.synchronize()
        pages = Pages(batch.seq_lens_cpu, self.block_size)
        pages.ship(torch.empty(pages.total, dtype=torch.int32, device=self._device))
        self._list_pages(batch.block_table[: batch.num_seqs], pages.starts, pages.pages)
        if batch.num_decodes:
            self._plan_decodes(pages, batch.num_decodes)
        if batch.num_decodes < batch.num_seqs:
            self._all_new = self._new_prompts is not None and prompts_are_new(batch)
            if self._all_new:
                self._plan_new_prompts(batch.query_start_loc_cpu[batch.num_decodes :])
            else:
                self._plan_extends(pages, batch.num_decodes, batch.query_start_loc_cpu)
        self._planned.record()

    def _plan_decodes(self, pages: Pages, num_decodes: int) -> None:
        num_pages = np.diff(pages.starts_cpu.numpy()[: num_decodes + 1])
        chunk = chunk_pages(num_pages, num_decodes, self._max_chunks, self._shape.num_blocks)
        self._decode.plan(pages, num_decodes, chunk, self._shape)

    def _plan_extends(self, pages: Pages, first: int, query_start_loc: np.ndarray) -> None:
        """Sequences from `first` on, the earlier ones having a token each."""
        first_page = int(pages.starts_cpu[first])
        self._prefill.plan(
            torch.from_numpy(query_start_loc[first:] - np.int32(first)),
            pages.starts_cpu[first:] - first_page,
            pages.pages[first_page:],
            pages.last_lens_cpu[first:],
            *self._shape.arguments,
            causal=True,
            **self._shape.types,
        )

    def _plan_new_prompts(self, query_start_loc: np.ndarray) -> None:
        starts = torch.from_numpy(query_start_loc - query_start_loc[0])
        plan_new_prompts(self._new_prompts, starts, self._shape)

    def __call__(
        self, q_THd: torch.Tensor, k_Thd: torch.Tensor, v_Thd: torch.Tensor, layer: int
    ) -> torch.Tensor:
        self._store_kv(k_Thd, v_Thd, self._slots, *self._layers[layer])
        wait_previous_ubatch()
        return self._attend((q_THd, k_Thd, v_Thd), layer)

    def store(
        self,
        qkv_TMd: torch.Tensor,
        layer: int,
        rotation_T1r: torch.Tensor | None = None,
        norm_Nd: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        caches = self._layers[layer]
        self._norm_rotate_store(qkv_TMd, norm_Nd, eps, rotation_T1r, self._slots, *caches)
        wait_previous_ubatch()

    def attend(self, qkv_TMd: torch.Tensor, layer: int) -> torch.Tensor:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        q_THd, k_Thd, v_Thd = qkv_TMd.split((heads, kv_heads, kv_heads), dim=1)
        return self._attend((q_THd, k_Thd, v_Thd), layer)

    def _attend(self, new: NewRows, layer: int) -> torch.Tensor:
        q_THd, caches = new[0], self._layers[layer]
        if self._graph is not None:
            return self._graph.run(new, caches)
        out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
        split, end = self._num_decodes, self._num_tokens
        if split:
            self._decode.wrapper.run(q_THd[:split], caches, out=out_THd[:split])
        prompts = slice(split, end)
        if split < end and self._all_new:
            self._new_prompts.run(*(rows[prompts] for rows in new), out=out_THd[prompts])
        elif split < end:
            self._prefill.run(q_THd[prompts], caches, out=out_THd[prompts])
        if end < len(q_THd):
            out_THd[end:] = 0
        return out_THd

    def reserve_graphs(self, max_rows: int, max_seqs: int, max_blocks: int) -> None:
        """Buffers for graphs of up to `max_rows` rows, of up to `max_seqs` sequences of up to `max_blocks` blocks each.

        Before any capture; what was captured before must not be replayed again.
        """
        self._plans = GraphPlans(
            self._flashinfer,
            self._list_pages,
            self._shape,
            self._device,
            max_rows=max_rows,
            max_seqs=max_seqs,
            max_blocks=max_blocks,
        )

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        """The forms to capture for steps of this size, of decodes alone or with prompts; any can be of the last one."""
        if not prompts:
            return GraphForm.EVEN_DECODES, GraphForm.DECODES
        if self._new_prompts is None or num_rows < NEW_PROMPT_ROWS:
            return (GraphForm.MIXED,)
        return GraphForm.NEW_PROMPTS, GraphForm.MIXED

    def form(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> GraphForm:
        """Which of them serves this batch best."""
        assert self._plans is not None, "reserve_graphs comes first"
        forms = self.forms(num_rows, prompts=prompts)
        fits = len(forms) > 1 and (
            prompts_are_new(batch) if prompts else self._plans.even(batch, num_rows)
        )
        return forms[0] if fits else forms[-1]

    def plan_graph(self, batch: AttentionBatch, num_rows: int, form: GraphForm) -> None:
        """Plan for a graph of `num_rows` rows and this form, of which the batch may leave the last ones empty.

        Every address and launch shape is that of the capture with the same two arguments. K and V of empty rows go
        nowhere; their output is finite, of decodes' forms zero.
        """
        assert self._plans is not None, "reserve_graphs comes first"
        self._planned.synchronize()
        self._graph = self._plans.plan(batch, num_rows, form)
        self._slots = self._plans.slots[:num_rows]
        self._planned.record()
