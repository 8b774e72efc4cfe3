"""Which rank hangs, by the signs of life of all ranks."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError

from cluster.supervisor.heartbeat import CAPTURE_FACTOR, CHECKS, Heartbeats, HungRankError
from tests.unit.ray_fakes import FakeHandle, FakeRank
from workers.rank.rank_info import Pulse


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def checked(*pulses: Pulse | None, times: int = CHECKS + 1, cpu_counts: bool = True) -> Heartbeats:
    """After `times` checks that found these pulses."""
    subject = Heartbeats(len(pulses), 8.0, cpu_counts=cpu_counts)
    for _ in range(times):
        subject.take(pulses)
    return subject


def step(number: int = 3, cpu_s: float = 1.0) -> Pulse:
    return Pulse(number, "step", cpu_s)


VOTE, SLEEP = Pulse(3, "vote", 1.0), Pulse(3, "sleep", 1.0)


@pytest.mark.parametrize(
    ("pulses", "hung", "reason"),
    [
        ((VOTE, step(), VOTE), {1}, "rank 1: stuck in step 3 for 8 s (cluster.hang_timeout_s)"),
        ((VOTE, SLEEP), {1}, "rank 1: asleep before step 3 for 8 s (cluster.hang_timeout_s)"),
        # One of them is the cause, and the other may wait for it in a collective.
        ((step(), step(), VOTE), set(), "ranks 0, 1: stuck in step 3 for 8 s"),
    ],
)
def test_the_rank_that_hangs_and_not_those_that_wait_for_it(pulses, hung, reason):
    hang = checked(*pulses).verdict()
    assert hang is not None and hang.ranks == hung and hang.reason.startswith(reason)
    assert checked(*pulses, times=CHECKS).verdict() is None, "the first check has no earlier one"


@pytest.mark.parametrize(
    "pulses", [(SLEEP, SLEEP), (VOTE, VOTE), (None, None), (Pulse(4, "sleep", 0.0), VOTE)]
)
def test_ranks_that_sleep_wait_or_have_no_loop_do_not_hang(pulses):
    assert checked(*pulses, times=10 * CHECKS).verdict() is None


def test_votes_are_progress_and_on_cpus_so_is_processor_time():
    votes, computes, waits_actively = (
        Heartbeats(2, 8.0, cpu_counts=on) for on in (True, True, False)
    )
    for check in range(3 * CHECKS):
        votes.take((step(check), VOTE))
        computes.take((step(cpu_s=check * 0.01), VOTE))
        waits_actively.take((step(cpu_s=check * 0.01), VOTE))
    assert votes.verdict() is None and computes.verdict() is None
    assert waits_actively.verdict().ranks == {0}


def test_a_rank_that_computes_for_too_long_hangs():
    subject = Heartbeats(2, 8.0, cpu_counts=True)
    for check in range(2 * CHECKS):
        overdue = check >= CHECKS
        assert subject.verdict() is None, check
        subject.take((Pulse(3, "step", float(check), overdue), VOTE))
    hang = subject.verdict()
    assert hang.ranks == {0} and hang.reason.startswith("rank 0: stuck in step 3 for 8 s")


def test_a_capture_may_take_longer_than_a_step():
    """Ranks capture a graph in the middle of a step that wants it, without a vote and, on a GPU, without a sign."""
    captures = (Pulse(3, "capture", 1.0), VOTE)
    limit = CHECKS * CAPTURE_FACTOR
    assert checked(*captures, times=limit, cpu_counts=False).verdict() is None
    hang = checked(*captures, times=limit + 1, cpu_counts=False).verdict()
    assert hang is not None and (hang.ranks, hang.seconds) == ({0}, 96.0)
    assert hang.reason == (
        "rank 0: stuck in the capture of a CUDA graph for step 3 for 96 s (cluster.hang_timeout_s x 12)"
    )


def test_the_age_of_the_vote_of_each_rank():
    clock = Clock()
    subject = Heartbeats(3, 8.0, cpu_counts=True, clock=clock)
    for number in range(5):
        clock.now = float(number)
        subject.take((step(number), step(2), Pulse(0, "sleep", 0.0)))
    clock.now = 6.0
    assert subject.vote_ages() == [2.0, 6.0, 0.0]


def watch(ranks: list[FakeRank], **options: Any) -> Any:
    subject = Heartbeats(len(ranks), 0.08, cpu_counts=True, **options)

    async def run() -> Any:
        async with asyncio.timeout(20):
            return await subject.watch([FakeHandle(rank) for rank in ranks])

    return asyncio.run(run())


def test_a_rank_without_an_answer_is_silent():
    ranks = [FakeRank(0), FakeRank(1)]
    ranks[0].hang.add("pulse")
    assert watch(ranks).ranks == {0}
    cut = [FakeRank(0), FakeRank(1)]
    cut[1].fail["pulse"] = ActorUnavailableError("cut", None)
    assert watch(cut).ranks == {1}


def test_a_rank_that_answers_with_an_error_lives():
    ranks = [FakeRank(0), FakeRank(1)]
    error = RayTaskError("pulse", "traceback", KeyError("x")).as_instanceof_cause()
    ranks[0].fail["pulse"] = error
    ranks[1].hang.add("pulse")
    assert watch(ranks).ranks == {1}


def test_a_stage_ends_with_its_result_or_by_a_silent_rank():
    async def run() -> None:
        ranks = [FakeRank(0), FakeRank(1)]
        handles = [FakeHandle(rank) for rank in ranks]

        def guard(stage: Any) -> Any:
            return Heartbeats(2, 0.04, cpu_counts=True).guard(dict(enumerate(handles)), stage)

        assert await guard(asyncio.sleep(0.02, "done")) == "done"

        async def fails() -> None:
            raise ValueError("no weights")

        with pytest.raises(ValueError, match="no weights"):
            await guard(fails())
        ranks[1].hang.add("pulse")
        with pytest.raises(HungRankError, match=r"rank 1: no sign of life for 0.16 s .* x 4"):
            await guard(asyncio.Event().wait())

    asyncio.run(run())
