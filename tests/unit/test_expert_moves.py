"""Moves of experts by votes: several ranks in one thread of steps, with stagers that stall, raise and return late."""

import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from workers.engine import expert_moves
from workers.engine.expert_moves import MAX_PAUSE_S, ExpertMoves
from workers.engine.staging_pace import Pace
from workers.rank.expert_staging import report
from workers.specs.expert_layout import ExpertLayout, ExpertMove, LayerLayout
from workers.step.step_sync import PlanConfig, StepPlan, decide
from workers.step.vote import Vote

CONFIG = PlanConfig(equal_tokens=False)
LAYERS = 4


class Stager:
    """Holds the map of each layer; `behaviour` says what the next call of `stage` does.

    room   layers that may wait for their commit
    """

    pace = Pace(share=1.0, longest_s=0.0)

    def __init__(self, room: int = 1) -> None:
        self.held, self.room = [(0, 1)] * LAYERS, room
        self.release = threading.Event()
        self.behaviour = "stage"
        self.calls, self.is_settled = 0, True

    def settled(self) -> bool:
        return self.is_settled

    def fits(self, layer: int, slots: tuple[int, ...], waiting) -> bool:
        return len(waiting) < self.room

    def stage(self, layer: int, slots: tuple[int, ...], waiting, rest):
        assert len(waiting) < self.room
        self.calls += 1
        release = self.release  # before the behaviour, because a test sets it after the behaviour
        if self.behaviour == "raise":
            raise OSError("the disk is gone")
        if self.behaviour == "stall":
            release.wait(60)
        rest()
        return layer, slots

    def commit(self, staged) -> None:
        layer, slots = staged
        self.held[layer] = slots


class Ranks:
    def __init__(self, num_ranks: int, stall_s: float = 3.0) -> None:
        self.now = 100.0
        self.stagers = [Stager() for _ in range(num_ranks)]
        self.moves = [
            ExpertMoves(stager, stall_s=stall_s, clock=lambda: self.now) for stager in self.stagers
        ]
        self.step_number = 0

    def begin(self, number: int, slots: tuple[int, ...], ranks=None, layers=range(LAYERS)) -> None:
        move = ExpertMove(number, tuple((layer, slots) for layer in layers))
        for rank in range(len(self.moves)) if ranks is None else ranks:
            self.moves[rank].begin(move)
        if ranks is None:
            self.step()  # stagers begin behind a vote

    def step(self, seconds: float = 0.01) -> StepPlan:
        self.now += seconds
        votes = [
            Vote(epoch=0, step=self.step_number, num_tokens=1, has_work=1, **moves.vote())
            for moves in self.moves
        ]
        self.step_number += 1
        plan = decide(np.stack([vote.row() for vote in votes]), CONFIG)
        for moves in self.moves:
            moves.act(plan)
        held = [stager.held for stager in self.stagers]
        assert all(one == held[0] for one in held), "all ranks have one map behind every step"
        return plan

    def staged(self, ranks=None, layers: int = 1) -> None:
        """Wait until so many layers of these ranks wait for their commit, or the ranks have failed."""
        for rank in range(len(self.moves)) if ranks is None else ranks:
            moves, deadline = self.moves[rank], time.monotonic() + 30
            while moves._move and len(moves._staged) < layers and not moves._error:
                assert time.monotonic() < deadline
                time.sleep(0.0005)

    def close(self) -> None:
        for stager in self.stagers:
            stager.release.set()
        assert all(moves.close() for moves in self.moves)


@pytest.fixture
def ranks():
    made = Ranks(3)
    yield made
    made.close()


def test_one_layer_a_step_on_all_ranks_at_once(ranks):
    ranks.begin(1, (1, 0))
    for layer in range(LAYERS):
        ranks.staged()
        assert ranks.step().move_commit == layer + 1
        assert ranks.stagers[0].held == [(1, 0)] * (layer + 1) + [(0, 1)] * (LAYERS - 1 - layer)
    assert ranks.step().move_commit == 0
    assert [(it.completed, it.committed, it.number, it.ended) for it in ranks.moves] == [
        (1, LAYERS, 0, 1)
    ] * 3


def test_nothing_is_committed_before_every_rank_has_the_move(ranks):
    ranks.begin(1, (1, 0), ranks=[0, 2])
    for _ in range(5):
        assert ranks.step().move_commit == 0
    ranks.stagers[0].is_settled = False
    ranks.begin(1, (1, 0), ranks=[1])
    for _ in range(5):
        assert ranks.step().move == 0, "rank 0 still copies what a move before has committed"
    assert not any(stager.calls for stager in ranks.stagers)
    ranks.stagers[0].is_settled = True
    assert ranks.step().move == 1
    ranks.staged()
    assert ranks.step().move_commit == 1


def test_a_step_commits_all_layers_that_every_rank_has_staged(ranks):
    """A rank with much room waits for the one with least, which goes on when a step has freed its memory."""
    for stager, room in zip(ranks.stagers, (4, 2, 3), strict=True):
        stager.room = room
    ranks.begin(1, (1, 0))
    for rank, room in enumerate((4, 2, 3)):
        ranks.staged([rank], room)
    assert ranks.step().move_commit == 2
    assert ranks.stagers[0].held == [(1, 0)] * 2 + [(0, 1)] * 2
    for rank in range(3):
        ranks.staged([rank], 2)
    assert ranks.step().move_commit == LAYERS
    assert ranks.stagers[1].held == [(1, 0)] * LAYERS
    assert [(it.completed, it.committed) for it in ranks.moves] == [(1, LAYERS)] * 3


def test_layers_that_wait_for_their_commit_are_lost_with_a_cancel(ranks):
    for stager in ranks.stagers:
        stager.room = LAYERS
    ranks.stagers[2].behaviour = "stall"
    ranks.begin(1, (1, 0))
    ranks.staged([0, 1], LAYERS)
    while not ranks.step(seconds=0.5).move_cancelled:
        pass
    assert ranks.stagers[0].held == [(0, 1)] * LAYERS and not ranks.moves[0]._staged


@pytest.mark.parametrize("behaviour", ["stall", "raise"])
def test_a_stager_that_stalls_or_raises_is_cancelled_by_all(ranks, behaviour, caplog):
    ranks.begin(1, (1, 0))
    ranks.staged()
    ranks.stagers[1].behaviour = behaviour
    assert ranks.step().move_commit == 1
    ranks.staged([0, 2])
    plans = [ranks.step(seconds=0.5) for _ in range(10)] if behaviour == "stall" else []
    if behaviour == "raise":
        ranks.staged()
        plans = [ranks.step()]
    (cancelled,) = [plan for plan in plans if plan.move_cancelled]
    assert cancelled.move_late == (1,)
    assert [it.cancelled for it in ranks.moves] == [1, 1, 1]
    assert ranks.stagers[0].held == [(1, 0), *[(0, 1)] * (LAYERS - 1)]
    reason = "ranks [1] have not staged" if behaviour == "stall" else "OSError: the disk is gone"
    assert reason in caplog.text
    ranks.stagers[1].behaviour = "stage"
    ranks.stagers[1].release.set()  # and returns late, to no effect
    ranks.moves[1]._thread.join()
    ranks.step()
    assert ranks.stagers[0].held == [(1, 0), *[(0, 1)] * (LAYERS - 1)]
    ranks.begin(2, (1, 0), layers=range(1, LAYERS))
    for _ in range(1, LAYERS):
        ranks.staged()
        ranks.step()
    assert ranks.stagers[2].held == [(1, 0)] * LAYERS


@pytest.mark.parametrize("in_stage", [True, False])
def test_a_thread_that_rests_holds_up_neither_a_commit_nor_the_end_of_the_move(in_stage):
    ranks, resting = Ranks(1), threading.Event()
    (moves,), (stager,) = ranks.moves, ranks.stagers
    rest = moves._rest

    def noted(move: ExpertMove, seconds: float) -> None:
        if in_stage == moves._staging:
            resting.set()
            rest(move, seconds)

    moves._rest = noted
    stager.room, stager.pace = LAYERS, Pace(share=1e-9, longest_s=1e9)
    ranks.begin(1, (1, 0))
    assert resting.wait(60)
    assert ranks.step().move_commit == (0 if in_stage else 1)
    assert stager.calls == 1 and moves.close() and not moves._thread.is_alive()


def test_a_move_after_a_stager_that_still_runs_is_cancelled(ranks):
    """The thread would write into the memory of the next move."""
    ranks.stagers[1].behaviour = "stall"
    ranks.begin(1, (1, 0))
    while not ranks.stagers[1].calls:
        time.sleep(0.0005)
    while not ranks.step(seconds=0.5).move_cancelled:
        pass
    calls = ranks.stagers[1].calls
    ranks.begin(2, (1, 0))
    assert ranks.moves[0].ended == 2 and ranks.stagers[1].calls == calls
    assert [it.cancelled for it in ranks.moves] == [2, 2, 2]


def test_a_thread_that_has_staged_its_last_layer_may_end_late(ranks, monkeypatch):
    """It writes to no memory any more, so it does not cancel the next move."""
    ends, start = threading.Event(), expert_moves.start_thread

    def start_late_end(work, failed, name):
        return start(lambda: (work(), ends.wait(60)), failed, name)

    monkeypatch.setattr(expert_moves, "start_thread", start_late_end)
    for number, slots in ((1, (1, 0)), (2, (0, 1))):
        ranks.begin(number, slots)
        for _ in range(LAYERS):
            ranks.staged()
            ranks.step()
    assert [(it.completed, it.cancelled) for it in ranks.moves] == [(2, 0)] * 3
    ends.set()


def test_a_move_that_comes_after_its_cancel_is_ignored(ranks):
    ranks.begin(3, (1, 0), ranks=[0, 1])
    while not (plan := ranks.step(seconds=0.5)).move_cancelled:
        pass
    assert plan.move_late[-1] == 2
    ranks.begin(3, (1, 0), ranks=[2])
    assert ranks.moves[2].number == 0 and ranks.moves[2].ended == 3
    with pytest.raises(ValueError, match="move 4 of experts runs"):
        ranks.begin(4, (1, 0), ranks=[0, 0])


def test_time_asleep_is_no_stall(ranks):
    ranks.stagers[1].behaviour = "stall"
    ranks.begin(1, (1, 0))
    assert not ranks.step(seconds=3600).move_cancelled, "the group has slept"
    assert MAX_PAUSE_S < 3.0


@pytest.mark.parametrize("steps", [300, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_random_steps_with_stalls_errors_and_late_returns(steps):
    ranks, draw, number = Ranks(4, stall_s=5.0), random.Random(1), 0
    for stager, room in zip(ranks.stagers, (1, 2, LAYERS, 3), strict=True):
        stager.room = room
    for _ in range(steps):
        if draw.random() < 0.3:
            stager = draw.choice(ranks.stagers)
            stager.behaviour = draw.choice(["stage", "stage", "stage", "stage", "raise", "stall"])
            if stager.behaviour != "stall":
                stager.release.set()
                stager.release = threading.Event()
        if not any(moves.number for moves in ranks.moves) and draw.random() < 0.3:
            number += 1
            ranks.begin(number, draw.choice([(1, 0), (0, 1)]))
        good = [n for n, it in enumerate(ranks.stagers) if it.behaviour == "stage"]
        # Else the steps go on while stagers work. Threads that start late cancel no move that all could complete.
        if draw.random() < 0.5 or len(good) == len(ranks.stagers):
            ranks.staged(good)
        ranks.step(seconds=draw.choice([0.01, 0.9]))
    cancelled, completed = ranks.moves[0].cancelled, ranks.moves[0].completed
    assert cancelled > 1 and completed > 1, (cancelled, completed)
    assert len({(it.cancelled, it.completed, it.committed) for it in ranks.moves}) == 1
    ranks.close()


def test_a_move_has_the_layers_that_change():
    def layout(*slots: tuple[int, ...]) -> ExpertLayout:
        return ExpertLayout(2, (0, 1, 2), {n: LayerLayout(it) for n, it in enumerate(slots)})

    present = layout((0, 1), (1, 0), (0, 1))
    assert ExpertMove.between(1, present, present) is None
    move = ExpertMove.between(7, present, layout((0, 1), (0, 1), (1, 0)))
    assert move == ExpertMove(7, ((1, (0, 1)), (2, (1, 0))))


def test_a_report_shows_no_layer_in_the_middle_of_its_commit():
    """Its load would be that of other experts, and the next move would be planned by it."""
    layout = ExpertLayout(2, (0, 1, 2), {0: LayerLayout((0, 1))})
    process = SimpleNamespace(rank=0, experts=SimpleNamespace(present=layout))
    stats = SimpleNamespace(experts=SimpleNamespace(recent_Ls=np.array([[7.0]]), step=64))
    reports = []
    reader = threading.Thread(target=lambda: reports.append(report(process, moves, stats)))

    class Slow(Stager):
        def commit(self, staged) -> None:
            process.experts.present = process.experts.present.with_slots(*staged)
            reader.start()
            # Ends as soon as the report is there, which may not be.
            reader.join(0.05)
            stats.experts.recent_Ls[0] = 0

    ranks = Ranks(1)
    ranks.stagers = [Slow()]
    ranks.moves = [moves] = [ExpertMoves(*ranks.stagers)]
    ranks.begin(1, (1, 0), layers=[0])
    ranks.staged()
    assert ranks.step().move_commit == 1
    reader.join()
    (found,) = reports
    assert found.layout.layers[0].slots == (1, 0) and found.rows == {0: (0.0,)}
    ranks.close()
