"""Ubatches of an epoch: which graphs are captured, and that a policy is measured once for all epochs of a process."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.all2all.allgather import AllGatherAllToAll
from workers.config import OverlapConfig
from workers.kv_cache.demand import KVDemand
from workers.overlap import epoch_ubatches
from workers.overlap.epoch_ubatches import EpochUbatches
from workers.overlap.policy import OverlapPolicy
from workers.overlap.rank_overlap import RankOverlap
from workers.parallel import ParallelDims
from workers.runner.graph_sizes import GraphKey, GraphSizes
from workers.step.step_sync import ForwardMode, GraphMode

SIZES = GraphSizes((1, 2, 8), (16, 256))
BYTES = 100  # of a graph
POLICY = OverlapPolicy(8, 64, None, {"decode": "", "prefill": "", "comm_sms": ""})


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

    provide = capture


def make_epoch(overlap: RankOverlap, *, mode: Any = "auto", sm_choices: Any = ()) -> EpochUbatches:
    """An epoch on CPU with two fake ubatch backends; none where `overlap` cuts nothing."""
    config: Any = SimpleNamespace(
        overlap=OverlapConfig(mode=mode),
        dims=ParallelDims(num_ranks=1),
        scheduler=SimpleNamespace(max_num_seqs=32, max_num_batched_tokens=256),
        cache=SimpleNamespace(block_size=16),
    )
    selection: Any = SimpleNamespace(all2all=SimpleNamespace(name="allgather"))
    context: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
    whole: Any = SimpleNamespace(all2all=None)
    made = EpochUbatches(overlap, config, selection, context, whole, lambda value: [value])
    assert len(made._backends) == (2 if overlap.may_cut else 0)
    return made


@pytest.fixture(autouse=True)
def fake_backends(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def build(selection: Any, context: Any, whole: Any, count: int) -> list[Any]:
        all2all = SimpleNamespace(name="allgather", sm_choices=(), close=lambda: None)
        return [SimpleNamespace(all2all=all2all) for _ in range(count)]

    monkeypatch.setattr(epoch_ubatches, "build_ubatch_backends", build)
    monkeypatch.setattr(epoch_ubatches.overlap_cache, "cache_folder", lambda: tmp_path)


def ubatch(mode: GraphMode, rows: int) -> GraphKey:
    return GraphKey(mode, rows, ubatch=True)


def test_the_bar_goes_on_after_whole_steps() -> None:
    epoch = make_epoch(RankOverlap(POLICY))
    graphs: Any = FakeGraphs()
    shown: list[tuple[int, int]] = []
    epoch._capture(graphs, lambda done, total: shown.append((done, total)))
    assert shown == [(done, 14) for done in range(10, 15)]
    assert {key for key in graphs.keys if key.ubatch} == {
        ubatch(GraphMode.DECODE, 8),
        ubatch(GraphMode.MIXED, 256),
    }
    assert epoch.graph_bytes == 4 * BYTES


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (SIZES, []),
        (GraphSizes((2, 16)), [("decode", 32), ("prefill", 128), ("prefill", 256)]),
        (GraphSizes((32,), (32, 128)), [("prefill", 256)]),
    ],
)
def test_ubatched_steps_without_a_graph_are_warmed_up(
    sizes: GraphSizes, expected: list[tuple[str, int]]
) -> None:
    epoch, runs = make_epoch(RankOverlap(POLICY)), []
    graphs: Any = FakeGraphs()
    graphs.sizes = sizes

    def run(phase: str, size: int, cut: bool) -> float:
        runs.append((phase, size))
        return 1.0

    epoch._warm_up(graphs, {"decode": 32, "prefill": 256}, run, frozenset())
    assert runs == expected


def test_captures_that_were_only_measured_count() -> None:
    epoch = make_epoch(RankOverlap(POLICY))
    graphs: Any = FakeGraphs()
    for rows in (2, 8):
        epoch._plan(graphs, ForwardMode.DECODE, rows, True)
    assert epoch.graph_bytes == 4 * BYTES
    epoch._capture(graphs, None)
    assert ubatch(GraphMode.DECODE, 2) not in graphs and ubatch(GraphMode.DECODE, 8) in graphs
    assert epoch.graph_bytes == 6 * BYTES, "one of three was there already"


class Tuned:
    """An epoch's runner and scheduler, and what `tune` does with them."""

    def __init__(self, epoch: EpochUbatches, monkeypatch: pytest.MonkeyPatch, gain: float):
        self.runs: list[tuple[str, int, bool]] = []
        self.dropped = False
        self.graphs: Any = FakeGraphs()

        def run(phase: str, size: int, cut: bool) -> float:
            self.runs.append((phase, size, cut))
            return gain if cut else 1.0

        monkeypatch.setattr(epoch, "timer", lambda *args: run)
        runner: Any = SimpleNamespace(
            graphs=self.graphs,
            model=SimpleNamespace(config="a model"),
            drop_ubatches=lambda: setattr(self, "dropped", True),
            limit_all2all=lambda comm_sms: None,
        )
        cache = SimpleNamespace(num_blocks=1000, demand=KVDemand(16))
        scheduler: Any = SimpleNamespace(cache=cache)
        epoch.tune(runner, scheduler, 512, {})


@pytest.mark.parametrize("gain", [0.5, 2.0])
def test_a_second_epoch_reuses_the_measured_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, gain: float
) -> None:
    overlap = RankOverlap.configured(OverlapConfig(), AllGatherAllToAll)
    first = Tuned(make_epoch(overlap), monkeypatch, gain)
    policy = overlap.policy
    assert first.runs and policy.enabled == (gain < 1)
    for path in tmp_path.iterdir():
        path.unlink()  # the second epoch must not need the file

    second_epoch = make_epoch(overlap)
    second = Tuned(second_epoch, monkeypatch, gain)
    assert not second.runs and overlap.policy == policy
    wanted = {key for key in first.graphs.keys if key.ubatch}
    assert {key for key in second.graphs.keys if key.ubatch} == wanted, "graphs live in an epoch"
    assert bool(wanted) == policy.enabled
    assert second.dropped == (not policy.enabled)


def test_a_new_process_takes_over_the_policy_of_the_older_ranks() -> None:
    tuned = RankOverlap(POLICY, tuned=True, warm=True)
    fresh = RankOverlap.configured(OverlapConfig(), AllGatherAllToAll)
    rows: list[Any] = []
    for overlap in (fresh, tuned):
        overlap.agree(lambda row: rows.append(row) or [row])

    def gather(row: Any) -> Sequence[Any]:
        return rows

    for overlap in (fresh, tuned):
        overlap.agree(gather)
        assert overlap.policy == POLICY and overlap.tuned
        assert not overlap.warm, "the new process has compiled nothing, so all ranks warm up"
