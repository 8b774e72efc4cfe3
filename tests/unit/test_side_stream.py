"""Work beside the current stream in CUDA graphs: its stream, and what waits for what. Streams are fakes."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.all2all.local import LocalAllToAll
from kernels.backends import side_stream
from kernels.backends.side_stream import MOST_ROWS, SideWork
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.pending import set_yield_ubatch
from kernels.routing.expert_load import ExpertLoad
from kernels.routing.expert_map import ContiguousMap
from kernels.routing.permute import Permutation
from tests.unit.model_case import make_batch
from tests.unit.test_ubatch_streams import CUDA, FakeStream
from workers.layers.builder import LayerBuilder
from workers.layers.moe import MoeBlock
from workers.specs.model import MoeSpec, RouterSpec, SharedExpertSpec

EXPERTS, HIDDEN = 4, 16
SPEC = MoeSpec(
    num_experts=EXPERTS,
    intermediate_size=8,
    activation="silu",
    router=RouterSpec(top_k=2, norm_topk_prob=True),
    shared=SharedExpertSpec(intermediate_size=8, activation="silu", gated=False),
)
SEVERAL = 32


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The streams of a thread that captures a graph: `caller`, the current one at first, and `side`."""
    state = SimpleNamespace(caller=FakeStream("caller"), side=FakeStream("side"), capturing=True)
    state.current = state.caller

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        before, state.current = state.current, stream
        yield
        state.current = before

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(side_stream, "_stream", lambda device: state.side)
    return state


def place_of_work(streams: SimpleNamespace, *args: Any, **options: Any) -> str:
    """Return the name of the stream that work runs on."""
    side = SideWork(*args, **options)
    found: str = side.run(lambda: streams.current.name)
    side.wait()
    return found


def test_work_is_behind_the_fork_and_before_the_join(streams: SimpleNamespace) -> None:
    side = SideWork(CUDA, SEVERAL)
    assert streams.side.waits == ["caller"] and not streams.caller.waits
    assert side.run(lambda more: (streams.current.name, more), 3) == ("side", 3)
    assert streams.current is streams.caller and not streams.caller.waits
    side.wait()
    assert streams.caller.waits == [("side", 0)]


def test_inputs_live_until_the_join(streams: SimpleNamespace) -> None:
    """Until then kernels of the current stream must not get their memory."""
    side, held = SideWork(CUDA, SEVERAL), []

    class Input:
        def __del__(self) -> None:
            held.append("freed")

    side.run(lambda _: None, Input())
    assert not held
    side.wait()
    assert held == ["freed"]


def test_only_steps_of_few_rows_in_whole_graphs_have_work_beside(streams: SimpleNamespace) -> None:
    for num_rows, place in ((1, "side"), (MOST_ROWS, "side"), (MOST_ROWS + 1, "caller")):
        assert place_of_work(streams, CUDA, num_rows) == place
    assert place_of_work(streams, CUDA, SEVERAL, allowed=False) == "caller"
    assert place_of_work(streams, torch.device("cpu"), SEVERAL) == "caller"
    set_yield_ubatch(lambda: None)
    try:
        assert place_of_work(streams, CUDA, SEVERAL) == "caller"
    finally:
        set_yield_ubatch(None)
    streams.capturing = False
    assert place_of_work(streams, CUDA, SEVERAL) == "caller"


def experts(all2all: Any) -> MoeBlock:
    """A layer on the CPU with a shared expert, whose weights are zeros."""
    backends: Any = SimpleNamespace(
        all2all=all2all, grouped_gemm=ReferenceGroupedGemm(), expert_load=ExpertLoad()
    )
    builder = LayerBuilder(
        hidden_size=HIDDEN,
        norm_eps=1e-6,
        backends=backends,
        expert_map=ContiguousMap(EXPERTS, 1),
        rank=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    block = MoeBlock(builder, SPEC, 0)
    for weights in weights_of(block):
        weights.zero_()
    return block


def weights_of(block: MoeBlock) -> list[torch.Tensor]:
    """All weights of a layer with a shared expert, in the model's dtype."""
    assert block.shared is not None
    linears = [block.router, block.shared.gate_up, block.shared.down]
    if block.shared.gate is not None:
        linears.append(block.shared.gate)
    found = [*block.parameters, block.norm.weight, *(linear.weight for linear in linears)]
    assert all(isinstance(weights, torch.Tensor) for weights in found)
    return found


@pytest.mark.parametrize("travels", [False, True])
@torch.inference_mode()
def test_the_shared_expert_runs_beside_the_routed_ones(
    streams: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, travels: bool
) -> None:
    """It forks behind the norm and joins behind the experts' sums; rows that travel leave it on the current stream."""
    experts_of = range(EXPERTS)
    all2all = LocalAllToAll(
        Permutation(experts_of, num_experts=EXPERTS, device="cpu", dtype=torch.int64)
    )
    if travels:
        monkeypatch.setattr(all2all, "no_overlap_reason", None)
    block = experts(all2all)
    assert block.shared is not None
    allow = lambda device, num_rows: streams.side  # noqa: E731
    monkeypatch.setattr(side_stream, "_side_stream", allow)
    seen: list[object] = []

    def note(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.append((name, streams.current.name, len(streams.side.waits)))
            assert not streams.caller.waits, "joined too early"
            return function(*args, **options)

        return call

    monkeypatch.setattr(block, "_normed", note("norm", block._normed))
    monkeypatch.setattr(block, "_route", note("route", block._route))
    monkeypatch.setattr(block.shared, "add_to", note("shared", block.shared.add_to))
    monkeypatch.setattr(all2all, "combine", note("combine", all2all.combine))
    batch = make_batch([[1], [2] * 4], [3, 0], padding=2)
    x_TD = torch.randn(len(batch.input_ids), HIDDEN)
    residual_TD, _ = block.forward(x_TD.clone(), None, batch)
    assert torch.equal(residual_TD, x_TD)
    place, forks = ("caller", 0) if travels else ("side", 1)
    assert seen == [
        ("norm", "caller", 0),
        *(("route", "caller", forks), ("shared", place, forks), ("combine", "caller", forks)),
    ]
    assert streams.caller.waits == ([] if travels else [("side", 0)])
