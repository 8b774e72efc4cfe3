"""The limit of a stage without a time limit: bytes that arrive carry it on, silence ends it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.supervisor.failures import StageTimeoutError
from cluster.supervisor.stage_progress import while_moving
from kernels.host.awake import LOOKS
from tests.unit.ray_fakes import FakeHandle, FakeRank, fake_group

LIMIT_S = 8.0


class MovingRank(FakeRank):
    """Reports the progress that the test sets."""

    done = 0

    async def progress(self) -> tuple[int, int]:
        await self._note("progress")
        return self.done, 0


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def with_clock(scenario: Callable[[Callable[[float], Awaitable[None]]], Awaitable[None]]) -> None:
    """Run `scenario(wait)` in a loop whose time passes in `wait(seconds)` alone, in steps of one look."""

    async def main() -> None:
        now, loop = 0.0, asyncio.get_running_loop()
        loop.time = lambda: now  # type: ignore[method-assign]

        async def wait(seconds: float) -> None:
            nonlocal now
            end = now + seconds
            while now < end:
                now = min(end, now + LIMIT_S / LOOKS)
                await settle()

        await scenario(wait)

    asyncio.run(main())


def begin(ranks: list[MovingRank]) -> tuple["asyncio.Future[str]", "asyncio.Task[str]"]:
    work = asyncio.get_running_loop().create_future()
    handles: list[Any] = [FakeHandle(rank) for rank in ranks]
    return work, asyncio.create_task(while_moving(work, handles, LIMIT_S))


def test_a_stage_goes_on_while_one_rank_moves():
    async def scenario(wait: Callable[[float], Awaitable[None]]) -> None:
        ranks = [MovingRank(rank) for rank in range(3)]
        ranks[0].hang.add("progress")
        work, stage = begin(ranks)
        for _ in range(10):
            await wait(0.75 * LIMIT_S)
            ranks[2].done += 1
        assert not stage.done()
        work.set_result("done")
        await settle()
        assert stage.result() == "done"

    with_clock(scenario)


def test_a_stage_without_progress_ends():
    async def scenario(wait: Callable[[float], Awaitable[None]]) -> None:
        ranks = [MovingRank(rank) for rank in range(2)]
        ranks[0].fail["progress"] = RuntimeError("no progress")
        work, stage = begin(ranks)
        await wait(LIMIT_S)
        assert not stage.done(), "the first report counts as progress"
        await wait(2 * LIMIT_S)
        with pytest.raises(StageTimeoutError, match="no rank reported progress for 8 s"):
            stage.result()
        assert work.cancelled()

    with_clock(scenario)


def test_the_first_start_ends_with_a_rank_that_hangs_as_it_fetches_the_checkpoint():
    """Its process may be stopped: it answers nothing."""
    subject, ranks, launcher = fake_group(3, 3, start_timeout_s=0.05)
    roster = subject._roster
    model = roster.config.model.model_copy(update={"revision": "0" * 40})
    roster.config = roster.wanted = roster.config.model_copy(update={"model": model})
    ranks[1].hang |= {"fetch_checkpoint", "progress"}
    asyncio.run(subject.start())
    assert subject.health.state == "failed" and launcher.killed == 1
    message = "start failed at stage 'checkpoint': no rank reported progress for 0.0"
    assert subject.health.error.startswith(message)
