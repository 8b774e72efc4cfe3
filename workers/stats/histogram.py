"""Counts by bucket, for one writer: half a microsecond an observation. Knows nothing of Prometheus."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Numbers of observations up to each bound, and their sum.

    counts has one entry for each bound and one beyond the last bound, not cumulative. Other threads may read a
    histogram; they may miss the latest observation.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def values(self) -> list[float]:
        """Return the counts, then the sum; the values of several processes may be added."""
        return [*self.counts, self.sum]
