"""The processes of a group: ranks, and standbys that wait to become ranks."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.supervisor.failures import failure_message
from cluster.supervisor.launcher import RankHandle
from cluster.supervisor.placement import RankLocation
from cluster.supervisor.ray_calls import result
from workers.config import RankConfig

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Member:
    """A process, the bundle that it runs in, the settings that it was started with, and its place once it answers.

    called   it was called to join an epoch
    """

    handle: RankHandle
    bundle: int
    config: RankConfig
    location: RankLocation | None = field(default=None, kw_only=True)
    called: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class Standby(Member):
    """A process without a rank. `ready` ends when it has loaded, `life` when its process has ended."""

    ready: asyncio.Future[None]
    life: asyncio.Future[None]

    @property
    def ended(self) -> bool:
        return self.life.done()

    def release(self) -> None:
        """Stop watching it."""
        self.ready.cancel()
        self.life.cancel()


async def live(ready: "asyncio.Future[None]", handle: RankHandle) -> None:
    """Return when a standby has joined a group. Raises when its process has failed."""
    await ready
    await result(handle.joined.remote())


async def all_ready(standbys: Sequence[Standby]) -> bool:
    """Return True when all have loaded, False as soon as a rebuild releases one. Raises the error of one that fails."""
    try:
        await asyncio.gather(*(standby.ready for standby in standbys))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the caller is cancelled, not a standby
            raise
        return False
    return True


def note_end(life: "asyncio.Future[None]") -> None:
    error = None if life.cancelled() else life.exception()
    if error is not None:
        logger.warning("a standby rank failed: %s", failure_message(error))
