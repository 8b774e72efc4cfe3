"""The pace of a thread that works beside steps: rests between pieces of work, so that it takes a share of time.

A burst of copies takes a core from the steps where cores are few, and the interpreter and the links everywhere. The
share counts the time that the thread has run, not the time that it has waited. Knows nothing of what the thread does.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

SHORTEST_REST_S = 0.001
"""Shorter rests are added up, because a rest takes some microseconds itself."""


@dataclass(frozen=True)
class Pace:
    """The pace of one task.

    share      of time in which the thread runs, 0 to 1
    longest_s  of all rests of the task: a long task takes a larger share and ends
    """

    share: float
    longest_s: float


class Rests:
    """The rests of one task of this thread. Called between pieces of work.

    rest   waits for so many seconds, or less where the task has become useless
    busy   seconds that this thread has run
    """

    def __init__(
        self,
        pace: Pace,
        rest: Callable[[float], object],
        busy: Callable[[], float] = time.thread_time,
    ):
        self._pace, self._rest, self._busy = pace, rest, busy
        self._left_s, self._owed_s, self._seen = pace.longest_s, 0.0, busy()

    def __call__(self) -> None:
        """Rest for the work since the last call, if that comes to a rest worth its cost."""
        now = self._busy()
        self._owed_s += (now - self._seen) * (1 / self._pace.share - 1)
        self._seen = now
        seconds = min(self._owed_s, self._left_s)
        if seconds >= SHORTEST_REST_S:
            self._rest(seconds)
            self._left_s -= seconds
            self._owed_s = 0.0
