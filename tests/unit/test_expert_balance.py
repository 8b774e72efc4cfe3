"""When a supervisor moves experts, and the map that it keeps for the next epoch, over ranks without Ray."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cluster.supervisor import group as group_module
from cluster.supervisor.expert_balance import MIN_ROWS, ExpertBalance
from kernels.routing.expert_map import ContiguousMap
from tests.unit.ray_fakes import FakeHandle, fake_group, rank_config, until
from workers.config import RankConfig
from workers.specs.expert_layout import ExpertLayout, ExpertMove, ExpertReport, LayerLayout

EXPERTS, LAYERS, RANKS = 8, 2, 2
SKEWED = (900.0, 800.0, 700.0, 100.0), (100.0, 100.0, 100.0, 100.0)
EVEN = (500.0, 500.0, 500.0, 500.0), (500.0, 500.0, 500.0, 500.0)


class Rank:
    """A rank that reports `rows`, and commits a whole move at once when a test lets it."""

    def __init__(self, rank: int):
        self.rank, self.rows, self.step = rank, SKEWED, 64
        self.layout = ExpertLayout.of(ContiguousMap(EXPERTS, RANKS), range(LAYERS))
        self.moves: list[ExpertMove] = []
        self.running = self.ended = 0
        self.fail: Exception | None = None

    async def expert_report(self, epoch: int) -> ExpertReport:
        assert epoch == 3
        if self.fail is not None:
            raise self.fail
        rows = dict.fromkeys(range(LAYERS), self.rows[self.rank])
        return ExpertReport(self.rank, self.step, self.layout, rows, self.running, self.ended)

    async def move_experts(self, epoch: int, move: ExpertMove) -> None:
        self.moves.append(move)
        self.running = move.number

    def commit(self, layers: int = LAYERS) -> None:
        """Commit the first layers; without all of them the move is cancelled."""
        for layer, slots in self.moves[-1].layers[:layers]:
            self.layout = self.layout.with_slots(layer, slots)
        self.running, self.ended = 0, self.moves[-1].number


def every(rebalance: str | int) -> RankConfig:
    return RankConfig(**rank_config(RANKS).model_dump() | {"experts": {"rebalance": rebalance}})


def balanced(
    scenario: Callable[[ExpertBalance, list[Rank]], Any], rebalance: str | int = "auto"
) -> None:
    async def run() -> None:
        ranks = [Rank(rank) for rank in range(RANKS)]
        balance = ExpertBalance(look_s=0.002)
        balance.begin([FakeHandle(rank) for rank in ranks], 3, every(rebalance))
        await scenario(balance, ranks)
        balance.end()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_skewed_load_moves_experts_once_and_the_next_epoch_has_the_new_map():
    async def scenario(balance: ExpertBalance, ranks: list[Rank]) -> None:
        await until(lambda: all(rank.moves for rank in ranks))
        assert ranks[0].moves == ranks[1].moves
        (move,) = ranks[0].moves
        assert move.number == 1 and [layer for layer, _ in move.layers] == [0, 1]
        assert balance.layout.layers[0].slots == move.layers[0][1]
        before, even = (
            ranks[0]
            .layout.with_loads({layer: it.loads for layer, it in balance.layout.layers.items()})
            .busiest()
        )
        assert balance.layout.busiest()[0] < before == 2 * 2500 and even == 2 * 1450
        for rank in ranks:
            rank.commit()
            rank.rows, rank.step = EVEN, 96
        await asyncio.sleep(0.05)
        assert len(ranks[0].moves) == 1, "the load is even now"
        assert balance.layout.layers[1].slots == move.layers[1][1]

    balanced(scenario)


def test_a_cancelled_move_leaves_the_present_map_and_another_number_follows():
    async def scenario(balance: ExpertBalance, ranks: list[Rank]) -> None:
        await until(lambda: all(rank.moves for rank in ranks))
        for rank in ranks:
            rank.commit(layers=1)
            rank.step = 96
        await until(lambda: all(len(rank.moves) > 1 for rank in ranks))
        assert [move.number for move in ranks[0].moves] == [1, 2]

    balanced(scenario)


FEW = (9.0, 8.0, 7.0, 1.0), (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("rows", [EVEN, FEW, tuple((MIN_ROWS / 9,) * 4 for _ in range(2))])
def test_an_even_load_and_one_by_chance_move_nothing(rows):
    async def scenario(balance: ExpertBalance, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.rows, rank.step = rows, 96
        await asyncio.sleep(0.05)
        assert not ranks[0].moves
        for rank in ranks:
            rank.rows, rank.step = SKEWED, 112
        await until(lambda: all(rank.moves for rank in ranks))

    balanced(scenario)


def test_a_load_that_no_plan_makes_more_even_is_planned_once(monkeypatch):
    """One expert has nearly all rows, and no rank has a slot for its copy."""
    plans = []
    planned = ExpertLayout.planned
    monkeypatch.setattr(ExpertLayout, "planned", lambda it: plans.append(1) or planned(it))

    async def scenario(balance: ExpertBalance, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.rows = (9000.0, 10.0, 10.0, 10.0), (750.0,) * 4
        for step in range(96, 96 + 16 * 10, 16):
            ranks[0].step = ranks[1].step = step
            await until(lambda step=step: balance._looks.seen == step)
        assert not ranks[0].moves and len(plans) == 1
        for rank in ranks:
            rank.rows = (9000.0, 900.0, 900.0, 900.0), (10.0,) * 4
        ranks[0].step = ranks[1].step = 1000
        await until(lambda: bool(ranks[0].moves))

    balanced(scenario)


def test_a_plan_that_takes_longer_than_its_epoch_changes_nothing_of_the_next(monkeypatch):
    planning, ended, planned = threading.Event(), threading.Event(), threading.Event()
    plan = ExpertLayout.planned

    def slow(layout: ExpertLayout) -> ExpertLayout:
        planning.set()
        assert ended.wait(60)
        return plan(layout)

    def known(*args: Any) -> ExpertMove | None:
        planned.set()
        return between(*args)

    between = ExpertMove.between
    monkeypatch.setattr(ExpertLayout, "planned", slow)
    monkeypatch.setattr(ExpertMove, "between", known)

    async def scenario(balance: ExpertBalance, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.step = 10_000
        assert await asyncio.to_thread(planning.wait, 60)
        monkeypatch.setattr(ExpertLayout, "planned", plan)
        # Of different moments: the next epoch learns nothing before the plan of this one has ended.
        ranks[0].step, ranks[1].step = 64, 80
        before = balance.layout
        balance.begin([FakeHandle(rank) for rank in ranks], 3, every(100))
        ended.set()
        assert await asyncio.to_thread(planned.wait, 60)
        assert balance.layout is before
        for rank in ranks:
            rank.step = 200
        await until(lambda: all(rank.moves for rank in ranks))

    balanced(scenario, rebalance=100)


def test_reports_of_different_moments_are_no_load():
    async def scenario(balance: ExpertBalance, ranks: list[Rank]) -> None:
        ranks[1].step = 80
        await asyncio.sleep(0.05)
        assert not ranks[0].moves and balance.layout is None
        ranks[0].step = 80
        await until(lambda: bool(ranks[0].moves))

    balanced(scenario)


def test_a_number_of_steps_lies_between_two_moves():
    async def scenario(balance: ExpertBalance, ranks: list[Rank]) -> None:
        await asyncio.sleep(0.05)
        assert not ranks[0].moves, "the epoch has run 64 steps"
        for rank in ranks:
            rank.step = 100
        await until(lambda: all(rank.moves for rank in ranks))
        for rank in ranks:
            rank.commit(layers=0)
        await asyncio.sleep(0.05)
        assert len(ranks[0].moves) == 1
        for rank in ranks:
            rank.step = 200
        await until(lambda: all(len(rank.moves) == 2 for rank in ranks))

    balanced(scenario, rebalance=100)


def test_a_rank_that_is_gone_ends_the_balancing_of_the_epoch():
    async def scenario(balance: ExpertBalance, ranks: list[Rank]) -> None:
        ranks[1].fail = RuntimeError("gone")
        await until(lambda: balance._task.done)
        assert not ranks[0].moves

    balanced(scenario)


def test_a_group_gives_its_map_to_the_next_epoch_and_ends_the_moves_first(monkeypatch):
    # The fakes' loops do not end by a stop.
    monkeypatch.setattr(group_module, "STOP_TIMEOUT_S", 0.02)

    async def scenario() -> None:
        group, ranks, _ = fake_group(rebuild_attempts=1)
        task = asyncio.create_task(group.run())
        await until(lambda: group.health.state == "serving")
        ((rendezvous, *_),) = ranks[0].calls["join_group"]
        assert rendezvous.layout is None
        balance = group._formation.balance
        balance.layout = ExpertLayout(2, (0, 1, 2), {0: LayerLayout((1, 0))})
        ranks[1].ended.set_exception(RuntimeError("it died"))
        await until(lambda: group.health[:3] == ("serving", 1, ""))
        assert ranks[0].calls["join_group"][1][0].layout is balance.layout
        await group.stop()
        task.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20))
