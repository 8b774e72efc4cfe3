"""The time for which this process was awake, for limits on waits for others.

A process that was stopped, swapped out or starved finds as it goes on that all limits in wall time have passed. Yet the
answers of others lie unread in its memory and sockets, or the others were paused with it. So a pause of this process is
no silence of others. Knows nothing of the others.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

LOOKS = 8
"""Looks within a limit, at least, where a time between two looks counts up to the limit / LOOKS."""


class AwakeTime:
    """The seconds for which this process was awake since the object was made. Belongs to one thread.

    longest_s   seconds that the time between two looks counts at most; the rest of a longer time was a pause. A thread
                that waits for others looks at least so often
    clock       returns seconds
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic):
        self.longest_s = longest_s
        self._clock, self._seen, self._awake_s = clock, clock(), 0.0

    def look(self) -> float:
        """Return the seconds so far."""
        now = self._clock()
        self._awake_s += min(now - self._seen, self.longest_s)
        self._seen = now
        return self._awake_s


async def wait_awake(futures: "Collection[asyncio.Future[Any]]", limit_s: float) -> None:
    """Return when all futures are done, or after `limit_s` seconds in which this process was awake."""
    awake = AwakeTime(limit_s / LOOKS, asyncio.get_running_loop().time)
    waiting = set(futures)
    while waiting and (left_s := limit_s - awake.look()) > 0:
        _, waiting = await asyncio.wait(waiting, timeout=min(left_s, awake.longest_s))
