"""`trace_step` where steps replay graphs: with events and graphs that stand in for CUDA's."""

import weakref
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import rank_config
from workers.rank import trace_step
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.runner.graph_sizes import GraphKey, GraphSizes
from workers.runner.model_runner import ModelRunner
from workers.step.scheduled_batch import ScheduledBatch
from workers.trace import recorder as span_recorder
from workers.trace.recorder import SpanRecorder

LAYERS = 2
IDLE = ScheduledBatch.of([])


class FakeCuda:
    """One stream and its clock. In a capture only external events are recorded, at each replay, and not kept alive."""

    def __init__(self) -> None:
        self.now = 0.0
        self.capture: list[weakref.ref] | None = None

    def is_current_stream_capturing(self) -> bool:
        return self.capture is not None

    def current_stream(self) -> str:
        return "the stream"

    def Event(self, *, enable_timing: bool, external: bool) -> "FakeEvent":
        assert enable_timing and external == self.is_current_stream_capturing()
        return FakeEvent(self)

    def replay(self, events: list[weakref.ref]) -> None:
        for reference in events:
            event = reference()
            assert event is not None, "a replay sets an event that is gone"
            self.tick(event)

    def tick(self, event: "FakeEvent") -> None:
        self.now += 1.0
        event.ms = self.now


class FakeEvent:
    def __init__(self, cuda: FakeCuda):
        self.cuda, self.ms = cuda, None

    def record(self, _stream: object) -> None:
        if self.cuda.capture is None:
            self.cuda.tick(self)
        else:
            self.cuda.capture.append(weakref.ref(self))

    def elapsed_time(self, end: "FakeEvent") -> float:
        if self.ms is None or end.ms is None:
            raise RuntimeError("never recorded")
        return end.ms - self.ms

    def synchronize(self) -> None:
        assert self.cuda.capture is None


class FakeGraphs:
    """Replays marks, and runs the step by `model`, which has none."""

    def __init__(self, cuda: FakeCuda, runner: ModelRunner, model: Any, sizes: GraphSizes):
        self.sizes, self.closed = sizes, False
        self._cuda, self._runner, self._model = cuda, runner, model
        self._marks: dict[GraphKey, list[weakref.ref]] = {}

    def captured(self) -> set[GraphKey]:
        return set(self._marks)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._marks

    def require(self, key: GraphKey) -> None:
        assert key in self

    def discard(self, keys: Iterable[GraphKey]) -> None:
        for key in set(keys):
            self._marks.pop(key, None)

    @torch.inference_mode()
    def capture(self, keys: Iterable[GraphKey], progress: Any = None) -> int:
        for key in keys:
            batch = self._runner._builder.build(IDLE, key.rows, graph=True)
            if key.ubatch:
                self._runner.ubatches.plan(batch)
            else:
                self._runner._attention.plan(batch)
            forward = (self._runner.ubatches if key.ubatch else self._runner.model).forward
            forward(batch)
            self._cuda.capture = self._marks[key] = []
            forward(batch)
            self._cuda.capture = None
        return 0

    def plan(self, batch: Any, key: GraphKey) -> Any:
        assert not self.closed
        graph = SimpleNamespace(logits=lambda batch: None, offs_Le=None)

        def replay() -> None:
            self._cuda.replay(self._marks[key])
            self._runner._attention.plan(batch)
            graph.hidden_TD = self._model.forward(batch)

        graph.graph = SimpleNamespace(replay=replay)
        return graph

    def close(self) -> None:
        self.closed = True
        self._marks.clear()


@pytest.fixture
def epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterable[Epoch]:
    """A rank that believes in its graphs, after its stages."""
    sizes = {"num_layers": LAYERS, "hidden_size": 64, "num_experts": 6, "head_dim": 32}
    config = rank_config(make_checkpoint(tmp_path / "model", **sizes), 1, overlap={"mode": "on"})
    epoch = Epoch(RankProcess(0, config), Rendezvous("", 0, "trace"), 30)
    epoch.load()
    epoch.start_engine(lambda ingress, outputs: None, lambda step: None)
    cuda = FakeCuda()
    made: list[FakeGraphs] = []

    def make_graphs(runner: ModelRunner, sizes: GraphSizes) -> None:
        runner.graphs = FakeGraphs(cuda, runner, epoch.model, sizes)
        made.append(runner.graphs)

    monkeypatch.setattr(ModelRunner, "make_graphs", make_graphs)
    monkeypatch.setattr(span_recorder, "torch", SimpleNamespace(cuda=cuda))
    on_cuda = SpanRecorder(torch.device("cuda"))
    monkeypatch.setattr(trace_step, "SpanRecorder", lambda device: on_cuda)
    epoch.engine.runner.make_graphs(GraphSizes((2, 4, 8, 16), (16, 64, 256)))
    yield epoch
    epoch.process.close()
    assert len(made) > 1 and all(graphs.closed for graphs in made)


@pytest.mark.parametrize(("phase", "num_tokens"), [("prefill", 200), ("decode", 8)])
def test_the_marks_of_both_forms_have_the_times_of_replays(epoch, phase, num_tokens):
    """Prompts before measured decodes replay whole graphs also when those in ubatches are traced."""
    trace = trace_step.trace_step(epoch, phase, num_tokens)
    assert trace.plain.order() == [("dispatch", 0), ("combine", 0)] * LAYERS
    one_layer = [(operation, index) for operation in ("dispatch", "combine") for index in range(2)]
    assert trace.ubatched.order() == one_layer * LAYERS
    for step in (trace.plain, trace.ubatched):
        assert step.launched is None, "the trace is not that of a graph"
        assert step.seconds > 0
        for x in step.all2alls:
            assert 0 < x.called < x.sent < x.idle < x.awaited < x.arrived < step.seconds


def test_graphs_end_with_a_trace_that_fails(epoch, monkeypatch):
    """A communicator cannot be left while graphs hold its operations, and a traceback keeps what failed alive."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no times")

    monkeypatch.setattr(trace_step, "_typical", fail)
    with pytest.raises(RuntimeError, match="no times"):
        trace_step.trace_step(epoch, "decode", 8)
