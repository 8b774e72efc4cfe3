"""Python's lock beside a step loop, and its log when it ends: an error where this rank failed."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kernels.host.shm import PeerLeftError
from workers.rank.step_loop import SWITCH_S, PeerFailedError, RankFailedError, StepLoop
from workers.step.step_sync import AbortedError


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


class FailingEpoch:
    def __init__(self, error: Exception):
        self.error = error

    def run(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "level", "kind"),
    [
        (AbortedError(), logging.INFO, PeerFailedError),
        (PeerLeftError("vote: rank 0 left the group"), logging.INFO, PeerFailedError),
        (RuntimeError("no memory"), logging.ERROR, RankFailedError),
    ],
)
def test_only_a_failure_of_this_rank_is_logged_as_an_error(
    caplog: pytest.LogCaptureFixture, error: Exception, level: int, kind: type[Exception]
) -> None:
    caplog.set_level(logging.INFO)

    async def run() -> Exception:
        epoch: Any = FailingEpoch(error)
        with pytest.raises(RankFailedError) as failure:
            await StepLoop(epoch).done()
        return failure.value

    assert type(asyncio.run(run())) is kind
    (record,) = caplog.records
    assert record.levelno == level and str(error) in record.getMessage()
    assert bool(record.exc_info) == (level == logging.ERROR)


class Watched:
    """Notes for how long a thread may keep Python's lock while the loop runs."""

    switch_s = 0.0

    def run(self) -> None:
        self.switch_s = sys.getswitchinterval()

    def close(self) -> None:
        pass


def test_no_thread_keeps_pythons_lock_from_a_step_loop_for_long() -> None:
    epoch: Any = Watched()

    async def run() -> None:
        await StepLoop(epoch).done()

    asyncio.run(run())
    assert epoch.switch_s == pytest.approx(SWITCH_S, rel=0.1)
