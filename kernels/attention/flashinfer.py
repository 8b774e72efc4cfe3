"""Attention by flashinfer over the paged KV cache: decodes and prompts, planned once a step. 16-bit floats on GPUs.

The block table becomes flashinfer's list of pages on the device, so a plan waits for nothing. Layers with equal specs
share a plan; each further spec has plans of its own. Forwards can also be planned for CUDA graphs, prompts on Hopper
only: `reserve_graphs` once, then `plan_graph` before the capture and before each replay of a size.

T tokens, H query heads, h KV heads, M = H + 2h, N = H + h, d head dim, r rotated values of a head.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from kernels.attention.base import AttentionBatch, GraphAttention, GraphForm
from kernels.attention.flashinfer_decodes import Pages, Shape, prompts_are_new
from kernels.attention.flashinfer_graphs import GraphPlans
from kernels.attention.flashinfer_modules import compile_modules, import_failure, plan_quickly
from kernels.attention.flashinfer_plans import (
    WORKSPACE_BYTES,
    EagerPlans,
    NewRows,
    Planned,
    workspace_bytes,
)
from kernels.attention.flashinfer_shared import SharedDecodes
from kernels.attention.shared_prefixes import FLASHINFER_MIB, SharingCost
from kernels.host.hopper import on_hopper
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.pending import wait_previous_ubatch

MIN_VERSION = (0, 6, 6)
NEEDED_BESIDE = {
    "triton": "triton 3.4 or newer, for the kernels beside it",
    # As flashinfer 0.6.6 and sgl-deep-gemm 0.1.4.post1 declare.
    "tvm_ffi": "apache-tvm-ffi from 0.1.6 to below 0.2, but 0.1.8 (beside DeepGEMM 0.1.11), for its calls",
}
COMPILED_WITH = {
    "nvcc": "install the CUDA toolkit, set CUDA_HOME to its folder",
    "ninja": "pip install ninja",
    "c++": "install g++, or set CXX to a C++ compiler",
}
MIN_CAPABILITY = (8, 0)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# Blocks of threads a multiprocessor that flashinfer aims at when it cuts long sequences.
BLOCKS_PER_SM = 2
# Rows from which prompts without computed tokens have graphs of their own: from there they save 1 % of a step or more.
NEW_PROMPT_ROWS = 1024


def _unavailable(device: torch.device) -> str | None:
    """Return what keeps flashinfer from running on this GPU, or None. Imports flashinfer if all else is present."""
    needed = ".".join(map(str, MIN_VERSION))
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return f"flashinfer-python is not installed, {needed} or newer is needed: install the gpu extra of Phalanx"
    if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < MIN_VERSION:
        return f"flashinfer-python {found} is installed, {needed} or newer is needed"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return "it needs compute capability {}.{}, found {}.{}".format(*MIN_CAPABILITY, *capability)
    for package, what in NEEDED_BESIDE.items():
        if find_spec(package) is None:
            return f"{package} is not installed; needed is {what}"
    if find_spec("flashinfer_jit_cache") is None and (missing := _missing_programs()):
        remedies = "; ".join(COMPILED_WITH[name] for name in missing)
        return (
            f"no {' and no '.join(missing)} was found to compile its kernels with ({remedies}), "
            "nor flashinfer-jit-cache, which contains them"
        )
    if (error := import_failure()) is not None:
        versions = f"flashinfer-python {found} is installed, {needed} or newer is needed"
        return f"import flashinfer failed ({versions}): {error}"
    return None


def _missing_programs() -> list[str]:
    """Return the programs of COMPILED_WITH that flashinfer would not find. Its own ninja is beside this Python."""
    found = {
        "nvcc": _nvcc(),
        "ninja": shutil.which("ninja")
        or shutil.which("ninja", path=os.path.dirname(sys.executable)),
        "c++": shutil.which(os.environ.get("CXX") or "c++"),
    }
    return [name for name in COMPILED_WITH if found[name] is None]


def _nvcc() -> str | None:
    """Return the compiler that flashinfer uses, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=os.path.join(home, "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


class FlashInferAttention(GraphAttention):
    """Wrappers of flashinfer over one workspace; one instance is planned for one forward at a time."""

    name = "flashinfer"
    devices = ("cuda",)
    auto = "reads the pages where they lie, planned once a step"
    fused_store = shortens = cascades = True
    distributions = ("flashinfer-python",)

    def __init__(self, specs: Sequence[AttentionSpec], block_size: int):
        super().__init__(specs, block_size)
        import flashinfer

        from kernels.triton.paged import list_pages, store_kv
        from kernels.triton.qk_rope import norm_rotate_store

        plan_quickly()
        self._flashinfer: Any = flashinfer
        self._list_pages, self._store_kv = list_pages, store_kv
        self._norm_rotate_store = norm_rotate_store
        kinds = list(dict.fromkeys(self.specs))
        self._kind_of_layer = [kinds.index(spec) for spec in self.specs]
        self._head_counts = [
            [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads] for spec in self.specs
        ]
        self._has_new_prompts = False
        # Of each distinct spec, in the order of first layers: shape, plans outside of graphs, and the plan to run.
        self._shapes: list[Shape] = []
        self._eager: list[EagerPlans] = []
        self._planned: Sequence[Planned] = ()
        self._graphs: GraphPlans | None = None
        self._sharing: SharedDecodes | None = None

    @classmethod
    def cascade_refusal(cls, specs: Iterable[AttentionSpec]) -> str | None:
        specs = tuple(specs)
        if len({spec.group_size for spec in specs}) > 1:
            return "layers have other groups of query heads"
        return super().cascade_refusal(specs)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return _unavailable(device)

    @classmethod
    def captures_prompts(cls, *, hopper: bool) -> bool:
        return hopper

    @classmethod
    def compile_kernels(cls, dtype: torch.dtype, specs: Iterable[AttentionSpec]) -> None:
        compile_modules(dtype, specs)

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        """Return the bytes of the workspace, which may be larger than this before Hopper."""
        return WORKSPACE_BYTES

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if shape.dtype not in DTYPES:
            return f"it computes in float16 or bfloat16, model.dtype is {shape.dtype_name}"
        if reason := super().unsupported_reason(shape):
            return reason
        others = {spec.head_dim for spec in shape.attention_specs}.difference(HEAD_DIMS)
        if others:
            known, found = (", ".join(map(str, dims)) for dims in (HEAD_DIMS, sorted(others)))
            return f"it takes a head_dim of {known}, the model's is {found}"
        return None

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Also compile flashinfer's kernels, if this machine has not done so before (minutes)."""
        super().bind(kv_caches)
        self._layers = [(cache[0], cache[1]) for cache in kv_caches]
        if not kv_caches:
            return
        dtype, device = kv_caches[0].dtype, kv_caches[0].device
        assert dtype in DTYPES, dtype
        self._device = device
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        blocks = BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        self._shapes = [
            Shape(spec, self.block_size, dtype, blocks // spec.num_kv_heads)
            for spec in dict.fromkeys(self.specs)
        ]
        hopper = on_hopper(device)
        self.mixed_graph = self.captures_prompts(hopper=hopper)
        self._has_new_prompts = hopper and dtype == torch.bfloat16
        size = max(workspace_bytes(shape, hopper=hopper) for shape in self._shapes)
        workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self._eager = [
            EagerPlans(self._flashinfer, shape, workspace, hopper=hopper) for shape in self._shapes
        ]
        self._planned, self._graphs = (), None
        if self.shared_reads is not None:
            self._sharing = SharedDecodes(self.specs, self.block_size, self.shared_reads, kv_caches)
            self.sharing_cost = SharingCost.on_gpu(self.kv_layout(self.specs[0]), FLASHINFER_MIB)
        # Of each set of wrappers, because a set copies schedules from pinned memory that its next plan overwrites.
        self._plan_copied: dict[str, torch.cuda.Event] = {
            name: torch.cuda.Event()  # type: ignore[no-untyped-call]
            for name in ("eager", "decodes", "prompts", "drafts")
        }
        self.compile_kernels(dtype, self.specs)
        self._load()

    def _load(self) -> None:
        """Plan one token as decode and as prompt, which loads the modules."""
        pages = Pages(np.ones(1, dtype=np.int32), self.block_size)
        pages.ship(torch.zeros(1, dtype=torch.int32, device=self._device))
        for plans in self._eager:
            plans.plan_decodes(pages, 1)
            plans.plan_extends(pages, 0, np.arange(2, dtype=np.int32))
        torch.cuda.synchronize(self._device)

    def plan(self, batch: AttentionBatch) -> None:
        self._planned, self._slots = self._eager, batch.slot_mapping
        if not batch.num_seqs:
            for plans in self._eager:
                plans.plan_nothing()
            return
        copied = self._plan_copied["eager"]
        copied.synchronize()
        pages = Pages(batch.seq_lens_cpu, self.block_size)
        pages.ship(torch.empty(pages.total, dtype=torch.int32, device=self._device))
        self._list_pages(batch.block_table[: batch.num_seqs], pages.starts, pages.pages)
        all_new = (
            self._has_new_prompts
            and batch.num_single_rows < batch.num_seqs
            and prompts_are_new(batch)
        )
        sharing = None if self.find_shared(batch) is None else self._sharing
        if sharing is not None:
            sharing.plan(batch)
        for plans, shape in zip(self._eager, self._shapes, strict=True):
            shared = None if sharing is None else sharing.of(shape.spec)
            plans.plan(batch, pages, all_new=all_new, shared=shared)
        copied.record(torch.cuda.current_stream(self._device))

    def __call__(
        self,
        q_THd: torch.Tensor,
        k_Thd: torch.Tensor,
        v_Thd: torch.Tensor,
        layer: int,
        sinks_H: torch.Tensor | None = None,
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

    def attend(
        self, qkv_TMd: torch.Tensor, layer: int, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        q_THd, k_Thd, v_Thd = qkv_TMd.split_with_sizes(self._head_counts[layer], 1)
        return self._attend((q_THd, k_Thd, v_Thd), layer)

    def _attend(self, new: NewRows, layer: int) -> torch.Tensor:
        return self._planned[self._kind_of_layer[layer]].run(new, self._layers[layer])

    def reserve_graphs(self, max_rows: int, max_seqs: int, max_blocks: int) -> None:
        self._graphs = GraphPlans(
            self._flashinfer,
            self._list_pages,
            self._shapes,
            self._device,
            max_rows=max_rows,
            max_seqs=max_seqs,
            max_blocks=max_blocks,
        )
        if self._sharing is not None:
            self._sharing.reserve_graphs(max_seqs, max_blocks)

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        shared = self.shared_forms(num_rows, prompts=prompts)
        if not prompts:
            return *shared, GraphForm.EVEN_DECODES, GraphForm.DECODES
        if not self._has_new_prompts or num_rows < NEW_PROMPT_ROWS:
            return *shared, GraphForm.MIXED
        return *shared, GraphForm.NEW_PROMPTS, GraphForm.MIXED

    def form(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> GraphForm:
        assert self._graphs is not None, "reserve_graphs comes first"
        for form in self.forms(num_rows, prompts=prompts)[:-1]:
            if form.shares:
                fits = self.find_shared(batch) is not None
            else:
                fits = prompts_are_new(batch) if prompts else self._graphs.even(batch, num_rows)
            if fits:
                return form
        return GraphForm.MIXED if prompts else GraphForm.DECODES

    def drafts_form(self, num_rows: int) -> GraphForm:
        assert self._graphs is not None, "reserve_graphs comes first"
        return GraphForm.DRAFTS if self._graphs.takes_drafts(num_rows) else GraphForm.MIXED

    def plan_graph(self, batch: AttentionBatch, num_rows: int, form: GraphForm) -> None:
        assert self._graphs is not None, "reserve_graphs comes first"
        drafts, prompts = form == GraphForm.DRAFTS, form.takes_prompts
        copied = self._plan_copied["drafts" if drafts else "prompts" if prompts else "decodes"]
        copied.synchronize()
        self._planned = self._graphs.plan(batch, num_rows, form, self._sharing)
        self._slots = self._graphs.slots[:num_rows]
        copied.record(torch.cuda.current_stream(self._device))

    def follows(self, num_rows: int) -> bool:
        return self.drafts_form(num_rows) == GraphForm.DRAFTS

    def shorten(self, lens_R: torch.Tensor, slots_R: torch.Tensor) -> None:
        assert self._graphs is not None, "reserve_graphs comes first"
        self._graphs.shorten(lens_R)
        self._slots = slots_R
