"""The thread that runs the step loop of one epoch, with its outcome and its processor time. Knows nothing of Ray."""

import asyncio
import logging
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from kernels.host.owned import start_thread
from kernels.host.shm import PeerLeftError
from workers.step.step_sync import LockstepError

if TYPE_CHECKING:
    from workers.rank.epoch import Epoch

logger = logging.getLogger(__name__)

SWITCH_S = 1e-4
"""Time for which a thread may hold Python's lock while another thread waits for it; Python's default is 5 ms.

The step loop gives up the lock in each call of torch, dozens of times a step, and waits for so long each time another
thread computes in Python.
"""


class RankFailedError(RuntimeError):
    """The rank's step loop ended with an error; it will not run again."""


class PeerFailedError(RankFailedError):
    """The step loop ended because another rank ended."""


class StepLoop:
    """Runs the engine of `epoch` until its group stops. Made in an event loop."""

    def __init__(self, epoch: "Epoch"):
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock: int | None = None  # of the thread's processor time
        self._thread = start_thread(partial(self._run, epoch), self._fail, "step-loop")

    @property
    def running(self) -> bool:
        """Whether the loop has not ended."""
        return not self._outcome.done()

    async def done(self) -> None:
        """Return when the group has stopped. Raises RankFailedError when this loop failed."""
        await asyncio.shield(self._outcome)

    def cpu_s(self) -> float | None:
        """Return the processor time of the thread in seconds; None before its start and after its end."""
        try:
            return None if self._clock is None else time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return None

    def end(self, epoch: "Epoch") -> None:
        """Abort `epoch` if the loop still runs in it, and wait for the end of the thread."""
        if self._thread.is_alive():
            epoch.abort()
        self._thread.join()

    def _run(self, epoch: "Epoch") -> None:
        sys.setswitchinterval(SWITCH_S)
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        epoch.run()
        epoch.close()
        self._outcome.get_loop().call_soon_threadsafe(self._outcome.set_result, None)

    def _fail(self, error: BaseException) -> None:
        lost_a_peer = isinstance(error, PeerLeftError) or (
            isinstance(error, LockstepError) and error.__cause__ is None
        )
        # Ranks end an epoch together, also where an operator scales or restarts the group: the supervisor logs why.
        if lost_a_peer:
            logger.info("the step loop ended: %s", error)
        else:
            logger.error("the step loop failed: %s", error, exc_info=error)
        kind = PeerFailedError if lost_a_peer else RankFailedError
        failure = kind(f"{type(error).__name__}: {error}")
        self._outcome.get_loop().call_soon_threadsafe(self._outcome.set_exception, failure)
