"""Graphs that idle ranks capture between votes, with ranks as threads and without a model."""

import threading

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
from workers.runner.graph_sizes import GraphSizes
from workers.step.step_output import StepOutput

__all__ = ["asynchronous"]  # a fixture


class CapturingRunner(CountingRunner):
    """A runner with graphs that were postponed; the third capture waits for `gate`."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.order: list[str] = []
        self._gate = gate

    def launch(self, batch, plan) -> Pending[StepOutput]:
        assert plan.graph_mode
        self.order.append("step")
        return super().launch(batch, plan)

    def capture_next(self) -> bool:
        num_captured = self.order.count("capture")
        if num_captured == 5:
            return False
        if num_captured == 2:
            self.capturing = True
            assert self._gate.wait(TIMEOUT_S)
            self.capturing = False
        self.order.append("capture")
        return True


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
