"""Graphs that idle ranks capture between votes, with ranks as threads and without a model."""

import threading
import time

import pytest

from kernels.pending import Pending
from tests.unit.test_engine import (
    TIMEOUT_S,
    CountingRunner,
    Group,
    ThreadVotes,
    asynchronous,
    until,
)
from workers.engine.engine import Engine
from workers.engine.postponed_captures import PostponedCaptures
from workers.runner.graph_sizes import GraphSizes
from workers.scheduler.scheduler import Scheduler
from workers.step.step_output import StepOutput
from workers.step.step_sync import StepPlan

__all__ = ["asynchronous"]  # a fixture


@pytest.fixture(autouse=True)
def soon_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.postponed_captures.CALM_S", 0.02)


class CapturingRunner(CountingRunner):
    """A runner with graphs that were postponed, its own; the third capture waits for `gate`."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.order: list[str] = []
        self.graphs = self
        self._gate = gate

    def launch(self, batch, plan) -> Pending[StepOutput]:
        assert plan.graph_mode
        self.order.append("step")
        return super().launch(batch, plan)

    @property
    def num_postponed(self) -> int:
        return 5 - self.order.count("capture")

    def capture_next(self) -> None:
        if self.num_postponed == 3:
            self.capturing = True
            assert self._gate.wait(TIMEOUT_S)
            self.capturing = False
        self.order.append("capture")


class CapturingGroup(Group):
    def __init__(self, num_ranks: int, asynchronous: bool):
        self.gate = threading.Event()
        super().__init__(num_ranks, asynchronous)

    def until_all(self, activity: str) -> None:
        until(lambda: all(engine.activity()[1] == activity for engine in self.engines))

    def _engine(self, rank: int, votes: ThreadVotes) -> Engine:
        engine = super()._engine(rank, votes)
        engine.runner = CapturingRunner(self.gate)
        engine._graph_sizes = GraphSizes((64,), (64,))
        return engine


def test_idle_ranks_capture_graphs_in_one_order_and_requests_come_first(asynchronous):
    group = CapturingGroup(3, asynchronous)
    group.submit(1, "a")
    group.gate.set()
    assert group.wait("a") == [2, 3, 4]
    group.submit(2, "b")
    group.wait("b")
    group.engines[0].stop()
    group.join()
    orders = [engine.runner.order for engine in group.engines]
    assert orders[0] == orders[1] == orders[2]
    assert orders[0].count("step") == 6
    steps = "".join(name[0] for name in orders[0])
    assert "sss" in steps and steps.index("sss") <= 3, steps


def test_a_sleeping_group_has_captured_all_graphs(asynchronous):
    group = CapturingGroup(2, asynchronous)
    group.until_all("capture")
    group.gate.set()
    group.until_all("sleep")
    assert [engine.runner.order for engine in group.engines] == [["capture"] * 5] * 2
    group.engines[0].stop()
    group.join()


def test_a_request_that_waits_for_kv_waits_for_no_capture(asynchronous, monkeypatch):
    """It is on one rank, outside its work; both ranks sleep meanwhile."""
    waits = True
    monkeypatch.setattr(Scheduler, "has_requests", property(lambda scheduler: waits))
    group = CapturingGroup(2, asynchronous)
    group.gate.set()
    group.until_all("sleep")
    time.sleep(0.1)
    assert all(engine.runner.order == [] for engine in group.engines)
    waits = False
    group.submit(1, "a")
    group.wait("a")
    until(lambda: all(engine.runner.num_postponed == 0 for engine in group.engines))
    group.engines[0].stop()
    group.join()


def test_a_group_is_calm_for_a_while_before_its_first_capture():
    """Each wait begins again behind a step with requests."""
    done: list[object] = []

    class Graphs:
        num_postponed = 9

        def capture_next(self) -> None:
            done.append("capture")

    captures, graphs = PostponedCaptures(done.append), Graphs()
    calm, waits = (StepPlan(False, (0,), calm=calm) for calm in (True, False))
    turns = [captures.turn(plan, step, graphs) for step, plan in enumerate((calm, calm, calm))]
    assert turns == [True] * 3 and done == [0.02, "capture", "capture"]
    assert not captures.turn(waits, 3, graphs) and not captures.turn(calm, 4, None)
    assert captures.turn(calm, 5, graphs) and captures.turn(calm, 8, graphs)
    assert done[3:] == [0.02, 0.02]
    graphs.num_postponed = 0
    assert not captures.turn(calm, 9, graphs)
