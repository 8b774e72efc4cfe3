"""The log of a step loop that ends: an error where this rank failed, none where its group ended the epoch."""

import asyncio
import logging
from typing import Any

import pytest

from kernels.host.shm import PeerLeftError
from workers.rank.step_loop import PeerFailedError, RankFailedError, StepLoop
from workers.step.step_sync import AbortedError


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
