"""Counts by bucket, for one writer: half a microsecond an observation. Knows nothing of Prometheus."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many observations fell up to each bound, and their sum.

    counts has one entry for each bound and one for all beyond; they are not cumulative. Other threads may read it:
    they can miss the latest observation, no more.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def values(self) -> list[float]:
        """The counts and then the sum: what adds up over processes."""
        return [*self.counts, self.sum]
