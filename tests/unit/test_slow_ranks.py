"""Which rank is slow, by the own time and the work of all ranks: the pure ratio, the watch over time, a replacement."""

import pytest

from cluster.supervisor import group, slow_ranks
from cluster.supervisor.placement import RankLocation
from cluster.supervisor.slow_ranks import (
    REPLACE_AGAIN_S,
    REPLACE_SLICES,
    SLICES,
    SlowRanks,
    slowdowns,
)
from tests.unit.ray_fakes import until
from tests.unit.test_rebuild import Scene, run
from workers.rank.rank_info import Pulse
from workers.stats.own_work import OwnWork

STEPS = 100


def work(own_ms: float, **per_step: int) -> OwnWork:
    """STEPS steps of 5 ms, `own_ms` of them own time; by default one sequence of 50 tokens decodes."""
    sizes = {
        name: STEPS * size for name, size in {"rows": 1, "seqs": 1, "keys": 50, **per_step}.items()
    }
    return OwnWork(STEPS, STEPS * own_ms / 1000, STEPS * 0.005, **sizes)


IDLE = {"rows": 1, "seqs": 0, "keys": 0}


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([work(1), work(5)], [0.2, 5.0]),
        ([work(1), work(1), work(5), work(1.25)], [0.8, 0.8, 5.0, 1.25]),
        ([work(5)] * 4, [1.0] * 4),
        ([work(5), work(5), work(1), work(1)], [5.0, 5.0, 0.2, 0.2]),
        # A long prompt takes time, and rows with long contexts too, but not more than in proportion.
        ([work(1), work(5, rows=256, keys=9000)], [0.2, 5 / 256]),
        ([work(1), work(5, keys=250)], [0.2, 1.0]),
        ([work(1, seqs=4, rows=8), work(5, seqs=8, rows=8)], [0.2, 2.5]),
        # Experts that many rows take; a small sample of them says nothing.
        ([work(1, expert_rows=64), work(5, expert_rows=640)], [0.2, 5 * 6464 / 64064]),
        (
            [work(1), OwnWork(STEPS, 0.5, 0.5, STEPS, STEPS, 50 * STEPS, expert_rows=8)],
            [0.2, 40 / 9],
        ),
        # Ranks without requests run padding: a slow one is found, and a rank with work is not slow for its work.
        ([work(1, rows=8, seqs=8, keys=400), work(5, **IDLE)], [0.0, 5.0]),
        ([work(1, **IDLE), work(5)], [0.2, 0.0]),
        ([work(0), work(0)], [1.0, 1.0]),
    ],
)
def test_times_are_compared_by_the_work_that_they_were_for(works, expected):
    assert slowdowns(works) == pytest.approx(expected)


class Watched:
    """Some ranks, of which each call of `pass_time` is a check after some time."""

    def __init__(self, num_ranks: int = 3, factor: float | None = 3.0, replace: bool = False):
        self.now = 0.0
        self.subject = SlowRanks(factor, replace=replace, clock=lambda: self.now)
        self.sums = [OwnWork()] * num_ranks
        self.begin()

    def begin(self) -> None:
        places = range(len(self.sums))
        self.subject.begin([RankLocation(rank, "n", f"10.0.0.{rank}", 7, (), 0) for rank in places])
        self.subject.take(self.sums)

    def pass_time(self, *own_ms: float, times: int = 1, seconds: float = 1.0) -> None:
        for _ in range(times):
            self.now += seconds
            self.sums = [a + work(ms) for a, ms in zip(self.sums, own_ms, strict=True)]
            self.subject.take(self.sums)


def test_a_slow_rank_is_named_after_seconds_and_until_it_is_as_fast_as_the_others(caplog):
    now = Watched()
    now.pass_time(1, 1, 1, times=5)
    assert now.subject.slowdowns == [1, 1, 1]
    now.pass_time(1, 4.5, 1, times=SLICES - 1)
    assert now.subject.slow == [] and now.subject.slowdowns[1] == pytest.approx(4.5)
    now.pass_time(1, 4.5, 1)
    assert now.subject.slow == [1]
    assert [record.message for record in caplog.records] == [
        "rank 1 is slow: its steps take 4.5 times as long as those of the others, process 7 on 10.0.0.1; "
        "all ranks wait for it"
    ]
    now.pass_time(1, 1, 1, times=SLICES - 1)
    assert now.subject.slow == [1]
    now.pass_time(1, 1, 1)
    assert now.subject.slow == [] and caplog.records[-1].message == "rank 1 is no longer slow"
    assert slow_ranks.SLICE_S * SLICES < 10


def test_pauses_waits_and_ranks_without_steps_are_not_slow():
    now = Watched()
    for _ in range(10):  # a pause now and then
        now.pass_time(1, 4.5, 1, times=SLICES - 1)
        now.pass_time(1, 1, 1)
    now.pass_time(
        0.1, 0.5, 0.1, times=20
    )  # it has five times as much to do, but is not what the others wait for
    before = now.subject.slowdowns
    for _ in range(20):  # the group sleeps
        now.now += 1
        now.subject.take(now.sums)
    assert now.subject.slow == [] and now.subject.slowdowns == before
    alone = Watched(1)
    alone.pass_time(5, times=10)
    off = Watched(factor=None)
    off.pass_time(1, 4.5, 1, times=10)
    assert alone.subject.slowdowns == off.subject.slowdowns == off.subject.slow == []


def test_a_rank_that_answers_late_is_judged_by_what_it_has_answered():
    now = Watched()
    for check in range(2 * SLICES + 2):
        now.now += 0.5
        now.sums = [a + work(ms) for a, ms in zip(now.sums, (1, 1, 4.5), strict=True)]
        now.subject.take([*now.sums[:2], now.sums[2] if check % 2 else None])
    assert now.subject.slow == [2]


def test_a_new_epoch_begins_with_new_sums():
    now = Watched()
    now.pass_time(1, 4.5, 1, times=SLICES)
    now.sums = [OwnWork()] * 4
    now.begin()
    assert now.subject.slow == now.subject.slowdowns == []
    now.pass_time(1, 1, 1, 4.5, times=SLICES)
    assert now.subject.slow == [3]


def test_a_rank_that_stays_slow_is_due_once_in_a_while():
    named, replacing = Watched(), Watched(replace=True)
    for now in (named, replacing):
        now.pass_time(1, 4.5, 1, times=REPLACE_SLICES - 1)
        assert now.subject.due() is None
        now.pass_time(1, 4.5, 1)
    assert named.subject.due() is None
    rank, reason, seconds = replacing.subject.due()
    assert (rank, seconds) == (1, REPLACE_SLICES * slow_ranks.SLICE_S)
    assert (
        reason.startswith("rank 1: slow, its steps take 4.5 times")
        and "cluster.replace_slow_rank" in reason
    )
    replacing.begin()
    replacing.pass_time(1, 4.5, 1, times=2 * REPLACE_SLICES)
    assert replacing.subject.due() is None, "its place is slow, not its process"
    replacing.pass_time(1, 4.5, 1, seconds=REPLACE_AGAIN_S)
    assert replacing.subject.due() is not None


def test_a_group_replaces_a_slow_rank_as_one_that_hangs(monkeypatch):
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 0.02)  # the fakes' loops do not end by a stop

    async def scenario() -> None:
        clock = iter(range(10**6))  # each check is a second
        watched = SlowRanks(3.0, replace=True, clock=lambda: float(next(clock)))
        now = Scene(hang_timeout_s=0.1, slow_ranks=watched)
        await now.serving(0)
        slow = now.ranks[1]

        def pulse(rank: int) -> Pulse:
            sums = work(4.5 if rank == 1 else 1)
            pulse.checks += 1
            return Pulse(
                pulse.checks, "step", 0.0, work=OwnWork(*(pulse.checks * value for value in sums))
            )

        pulse.checks = 0
        for rank in now.ranks:
            rank.pulse = lambda rank=rank.rank: answer(pulse(rank))
        await until(lambda: now.group.status.slow == [1] or now.group.health.epoch == 1)
        await now.serving(1)
        assert now.launcher.replaced == [1] and now.ranks[1] is not slow
        assert now.group.status.last_rebuild.reason.startswith("rank 1: slow, its steps take")
        assert (await now.group.refreshed_status()).to_json()["slow_ranks"] == []
        await now.close()

    async def answer(pulse: Pulse) -> Pulse:
        return pulse

    run(scenario())
