"""Graphs of steps in slices: which are captured, what they took, and that the start shows it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.config import OverlapConfig
from workers.engine.step_sync import ForwardMode, GraphMode
from workers.runner.graph_sizes import GraphKey, GraphSizes
from workers.ubatch.policy import OverlapPolicy
from workers.ubatch.rank_ubatches import RankUbatches

SIZES = GraphSizes((1, 2, 8), (16, 64))
BYTES = 100  # of a graph


class FakeGraphs:
    """Graphs of two forms each."""

    def __init__(self) -> None:
        self.sizes, self.keys = SIZES, set(SIZES.whole_steps())

    def __contains__(self, key: GraphKey) -> bool:
        return key in self.keys

    def captured(self) -> set[GraphKey]:
        return set(self.keys)

    def count(self, keys: Any) -> int:
        return 2 * len(list(keys))

    def discard(self, keys: Any) -> None:
        self.keys -= set(keys)

    def capture(self, keys: Any, progress: Any = None) -> int:
        count = self.count(keys)
        for done in range(count + 1) if progress else ():
            progress(done, count)
        self.keys |= set(keys)
        return BYTES * count


@pytest.fixture
def overlap() -> RankUbatches:
    config: Any = SimpleNamespace(overlap=OverlapConfig(mode="off"), num_ranks=2)
    selection: Any = SimpleNamespace(all2all=SimpleNamespace(name="allgather"))
    context: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
    made = RankUbatches(config, selection, context, SimpleNamespace())  # type: ignore[arg-type]
    made.policy = OverlapPolicy(8, 64, None, {})
    return made


def sliced(mode: GraphMode, rows: int) -> GraphKey:
    return GraphKey(mode, rows, ubatch=True)


def test_the_bar_goes_on_after_whole_steps(overlap: RankUbatches) -> None:
    graphs: Any = FakeGraphs()
    told: list[tuple[int, int]] = []
    overlap._capture(graphs, lambda done, total: told.append((done, total)))
    assert told == [(done, 14) for done in range(10, 15)]
    assert {key for key in graphs.keys if key.ubatch} == {
        sliced(GraphMode.DECODE, 8),
        sliced(GraphMode.MIXED, 64),
    }
    assert overlap.graph_bytes == 4 * BYTES


def test_what_was_captured_to_be_measured_counts(overlap: RankUbatches) -> None:
    graphs: Any = FakeGraphs()
    for rows in (2, 8):
        overlap._plan(graphs, ForwardMode.DECODE, rows, True)
    assert overlap.graph_bytes == 4 * BYTES
    overlap._capture(graphs, None)
    assert sliced(GraphMode.DECODE, 2) not in graphs and sliced(GraphMode.DECODE, 8) in graphs
    assert overlap.graph_bytes == 6 * BYTES, "one of three was there already"
