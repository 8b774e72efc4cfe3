"""Ranks on a CPU that replay graphs as ranks on GPUs do: whole steps, ubatches and the passes of draft models.

The kernels are those of a CPU, or those of a GPU: Triton's interpreter, and `tests.flashinfer_fake`.
"""

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.backends.select import Backends
from tests.distributed.engine_harness import RankResult, run_rank
from tests.late_drafts import right_drafts
from tests.unit.graph_fakes import EagerGraphs, EagerPlanner, make_capturable
from workers.overlap.epoch_ubatches import ubatch_graphs
from workers.rank.epoch import Epoch
from workers.rank.rank_info import KV_CACHE
from workers.runner import cuda_graphs, model_runner
from workers.runner.accepted_drafts import AcceptedDrafts
from workers.runner.cuda_graphs import GraphPlanner
from workers.runner.draft_passes import DraftPasses
from workers.runner.graph_sizes import GraphKey, GraphSizes, decode_sizes, mixed_sizes
from workers.runner.step_results import StepResults
from workers.sampling.sampler import Sampler

FAILURES = {
    "sample": (Sampler, "sample"),
    "enter": (AcceptedDrafts, "enter"),
    "copy": (StepResults, "copy"),
}


def graph_sizes(kind: str, seqs: int, chunk: int, drafts: int, *, adapters: bool) -> GraphSizes:
    """Return sizes of graphs for up to `seqs` sequences and `chunk` tokens.

    kind    all: each forward has one; first: the further passes of a draft model have none; few: only small forwards
            do, so that passes are captured behind eager ones and eager behind captured ones; none
    """
    if kind == "none":
        return GraphSizes()
    if kind == "few":
        return GraphSizes((1, 2), (8,), (4,), (1, 2), drafts, adapters)
    further = (decode_sizes(seqs), drafts) if kind == "all" else ((), 0)
    sizes = decode_sizes(seqs), mixed_sizes(chunk), decode_sizes(chunk)
    return GraphSizes(*sizes, *further, adapters)


class UbatchPlanner(EagerPlanner):
    """The planner of a ubatch, over the caches of whole steps."""

    def __init__(self, backends: Backends, whole: EagerPlanner) -> None:
        self._attention, self._linear = backends.attention, backends.linear_attention
        self._spare_slot = whole._spare_slot
        self._attention.bind(whole._attention.kv_caches)


def plan_eagerly(runner: Any, patches: pytest.MonkeyPatch) -> None:
    """Let attentions of a CPU, which have no graphs, plan those of a runner."""
    if runner.drafts is not None:
        make_capturable(runner.drafts.attention, patches)
    backends = runner._backends
    whole = EagerPlanner(backends.attention, backends.linear_attention)
    planners = {id(backends.attention): whole}

    def planner_of(backends: Backends) -> EagerPlanner:
        found = planners.get(id(backends.attention))
        if found is None:
            found = planners[id(backends.attention)] = UbatchPlanner(backends, whole)
        return found

    patches.setattr(GraphPlanner, "of", planner_of)


def capture(epoch: Epoch, sizes: GraphSizes, patches: pytest.MonkeyPatch, *, gpu: bool) -> None:
    """Give the epoch's runner graphs of all sizes. gpu: its attention has graphs of its own."""
    epoch.run_stage(KV_CACHE, lambda done, total: None)
    runner, ubatches = epoch.runner, epoch.runner.ubatches
    if not gpu:
        plan_eagerly(runner, patches)
    patches.setattr(cuda_graphs, "_capture_stream", lambda device: None)
    patches.setattr(model_runner, "StepGraphs", EagerGraphs)
    graphs = runner.make_graphs(sizes)
    keys = set(graphs.keys)
    if ubatches is not None:
        keys |= ubatch_graphs(sizes, epoch.ubatches.policy, ubatches.num_ubatches)
    graphs.provide(keys)
    epoch.graph_sizes = sizes


@functools.cache
def _interpreter() -> None:
    from tests.triton.interpreter import speed_up

    speed_up()


def run_as_gpu(patches: pytest.MonkeyPatch) -> None:
    """Let the kernels of GPUs take tensors of a CPU: Triton's in its interpreter, flashinfer's by a fake."""
    from kernels.attention.triton_paged import TritonPagedAttention
    from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
    from kernels.linear_attention.triton_delta import TritonLinearAttention
    from tests.flashinfer_fake import use_flashinfer

    _interpreter()
    for backend in (TritonPagedAttention, TritonLinearAttention, TritonGroupedGemm):
        patches.setattr(backend, "devices", ("cpu",))
        patches.setattr(backend, "unavailable", classmethod(lambda cls, device: None))
    grouped = classmethod(lambda cls, shape: cls(2, hopper=False))
    patches.setattr(TritonGroupedGemm, "build", grouped)
    use_flashinfer(patches)
    make = AcceptedDrafts.__init__

    def make_fused(self: AcceptedDrafts, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self.fused = True

    patches.setattr(AcceptedDrafts, "__init__", make_fused)


def use_no_device(patches: pytest.MonkeyPatch) -> None:
    """Let what waits for a GPU, or asks what it is, find one that is never busy."""
    event = SimpleNamespace(synchronize=lambda: None, record=lambda stream=None: None)
    properties = SimpleNamespace(multi_processor_count=2)
    for name, value in (
        ("Event", event),
        ("current_stream", None),
        ("empty_cache", None),
        ("get_device_properties", properties),
        ("memory_reserved", 0),
        ("synchronize", None),
    ):
        patches.setattr(torch.cuda, name, lambda device=None, value=value: value)


def run_rank_in_graphs(
    sizes: GraphSizes, answers: Mapping[str, Sequence[int]], depth: int, gpu: bool, *arguments: Any
) -> RankResult:
    """Run a rank as `run_rank`, with graphs of these sizes.

    Among the gauges of the result are the graphs planned: `graphs`, and `graphs_idle` of them without sequences.

    answers, depth  as in `right_drafts`; depth 0: drafts are those of the draft model
    gpu             with the kernels of a GPU, where the configuration selects them
    """
    start, plan = Epoch.start_engine, EagerGraphs.plan
    planned = {"graphs": 0, "graphs_idle": 0}
    with pytest.MonkeyPatch.context() as patches:

        def start_captured(epoch: Epoch, *rest: Any) -> Any:
            if sizes:
                capture(epoch, sizes, patches, gpu=gpu)
            return start(epoch, *rest)

        def plan_counted(graphs: EagerGraphs, batch: Any, key: GraphKey) -> Any:
            planned["graphs"] += 1
            planned["graphs_idle"] += not batch.num_seqs
            return plan(graphs, batch, key)

        use_no_device(patches)
        if gpu:
            run_as_gpu(patches)
        patches.setattr(Epoch, "start_engine", start_captured)
        patches.setattr(EagerGraphs, "plan", plan_counted)
        if depth:
            patches.setattr(DraftPasses, "run", right_drafts(answers, depth))
        result = run_rank(*arguments)
    result.gauges |= planned
    return result


def run_failing_rank(where: str, sizes: GraphSizes, rank: int, *arguments: Any) -> RankResult:
    """Run a rank as `run_rank_in_graphs`; rank 1 fails in one of FAILURES once it has sampled some steps."""
    owner, name = FAILURES[where]
    function, calls = getattr(owner, name), 0

    def fail(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise RuntimeError("no result")
        return function(*given)

    with pytest.MonkeyPatch.context() as patches:
        if rank == 1:
            patches.setattr(owner, name, fail)
        return run_rank_in_graphs(sizes, {}, 0, False, rank, *arguments)
