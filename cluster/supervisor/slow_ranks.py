"""Which rank of a group is slow: its own time of the steps is a multiple of that of the other ranks.

In lockstep each rank takes as long as the slowest one. The slow rank is the one that does not wait. A rank with more
work is not slow: if rank A has at most n times as much of each kind of work as rank B, it takes at most n times as
long, whatever each kind costs. So ratios of times are divided by ratios of work. Knows nothing of rebuilds.
"""

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import NamedTuple

from cluster.supervisor.placement import RankLocation
from workers.stats.own_work import OwnWork

logger = logging.getLogger(__name__)

SLICE_S = 1.0
MIN_STEPS = 4
"""A slice of time is judged when it is SLICE_S long and has MIN_STEPS steps."""
SLICES = 4
"""Slices in a row after which a rank is named, or is no longer named: one long pause is no reason."""
REPLACE_SLICES = 12
"""Slices in a row after which a slow rank is replaced."""
REPLACE_AGAIN_S = 600.0
"""Seconds between two replacements, because a new process on a slow machine is slow too."""
MIN_OWN_SHARE = 0.5
"""Share of the steps' time that is the own time of a slow rank: a rank that waits does not hold up the others."""
FEW_EXPERT_ROWS = 64
"""Added to both counts before two ranks' expert rows are compared, because small samples differ by chance."""


class SlowRank(NamedTuple):
    """A rank that is to be replaced, after it was slow for `seconds`."""

    rank: int
    reason: str
    seconds: float


def slowdowns(works: Sequence[OwnWork]) -> list[float]:
    """Return how many times as long each rank takes as the others, by their median. One slice of time of all ranks."""
    return [
        median_low([_ratio(own, peer) for other, peer in enumerate(works) if other != rank])
        for rank, own in enumerate(works)
    ]


def _ratio(own: OwnWork, peer: OwnWork) -> float:
    """Return the ratio of the own times of a step over the greatest ratio of work, which is taken as 1 at least."""
    if not peer.own_s:
        return 1.0
    times = (own.own_s / own.steps) / (peer.own_s / peer.steps)
    work = [1.0, (own.expert_rows + FEW_EXPERT_ROWS) / (peer.expert_rows + FEW_EXPERT_ROWS)]
    for mine, others in ((own.rows, peer.rows), (own.seqs, peer.seqs), (own.keys, peer.keys)):
        if mine:
            work.append((mine / own.steps) / (others / peer.steps) if others else float("inf"))
    return times / max(work)


class SlowRanks:
    """The slow ranks of one group, over its epochs.

    factor   cluster.slow_rank_factor: a slow rank takes this multiple of the others' time; None: no rank is slow
    replace  cluster.replace_slow_rank: `due` names a rank that stays slow
    """

    def __init__(
        self,
        factor: float | None = None,
        *,
        replace: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._factor, self._replace, self._clock = factor, replace, clock
        self._replaced_at: float | None = None
        self.begin(())

    @property
    def slow(self) -> list[int]:
        """The ranks that are slow now."""
        return [rank for rank, is_slow in enumerate(self._slow) if is_slow]

    @property
    def slowdowns(self) -> list[float]:
        """How many times as long as the others each rank takes, in the last slice; empty before the first one."""
        return self._slowdowns

    def begin(self, locations: Sequence[RankLocation]) -> None:
        """Forget the ranks of the epoch before, and watch the ranks at `locations`."""
        self._locations = list(locations)
        num_ranks = len(locations)
        self._works: list[OwnWork | None] = [None] * num_ranks
        self._start: list[OwnWork] | None = None  # of the slice
        self._started = 0.0
        self._slow = [False] * num_ranks
        self._changes = [0] * num_ranks  # slices in a row that contradict _slow
        self._slices = [0] * num_ranks  # slices in a row in which the rank was slow
        self._slowdowns: list[float] = []

    def take(self, works: Sequence[OwnWork | None]) -> None:
        """Take the sums of all ranks; None for a rank without an answer."""
        if self._factor is None or len(self._locations) < 2:
            return
        self._works = [new or old for new, old in zip(works, self._works, strict=True)]
        known = [work for work in self._works if work is not None]
        if len(known) < len(self._works):
            return
        now = self._clock()
        if self._start is None:
            self._start, self._started = known, now
        parts = [end - start for end, start in zip(known, self._start, strict=True)]
        if now - self._started >= SLICE_S and min(part.steps for part in parts) >= MIN_STEPS:
            self._start, self._started = known, now
            self._judge(parts)

    def due(self) -> SlowRank | None:
        """Return a rank to replace, if there is one; the caller replaces it."""
        if not self._replace:
            return None
        now = self._clock()
        if self._replaced_at is not None and now - self._replaced_at < REPLACE_AGAIN_S:
            return None
        for rank, slices in enumerate(self._slices):
            if slices >= REPLACE_SLICES:
                self._replaced_at = now
                reason = f"rank {rank}: slow, {self._figures(rank)} (cluster.replace_slow_rank)"
                return SlowRank(rank, reason, REPLACE_SLICES * SLICE_S)
        return None

    def _judge(self, parts: Sequence[OwnWork]) -> None:
        assert self._factor is not None
        self._slowdowns = slowdowns(parts)
        for rank, (part, slowdown) in enumerate(zip(parts, self._slowdowns, strict=True)):
            slow = slowdown >= self._factor and part.own_s >= MIN_OWN_SHARE * part.total_s
            self._slices[rank] = self._slices[rank] + 1 if slow else 0
            self._changes[rank] = self._changes[rank] + 1 if slow != self._slow[rank] else 0
            if self._changes[rank] >= SLICES:
                self._slow[rank], self._changes[rank] = slow, 0
                self._report(rank)

    def _report(self, rank: int) -> None:
        if self._slow[rank]:
            logger.warning("rank %d is slow: %s; all ranks wait for it", rank, self._figures(rank))
        else:
            logger.warning("rank %d is no longer slow", rank)

    def _figures(self, rank: int) -> str:
        place = self._locations[rank]
        return (
            f"its steps take {self._slowdowns[rank]:.1f} times as long as those of the others, "
            f"process {place.pid} on {place.address}"
        )
