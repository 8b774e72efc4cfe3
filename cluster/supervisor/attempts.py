"""Counts the failures of a group in a row, and decides whether another rebuild is allowed. Knows nothing of ranks.

Failures due to one request count once. So a failure of a rank with a request on trial is not counted at once: the
ingress of the request judges it after the rebuild, because the ingress alone gets the notice that a trial begins.
"""

from collections.abc import Collection


class Attempts:
    """The rebuilds of one group.

    limit   failures in a row that a rebuild may follow; 0 = a failed rank ends the group
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._failures = 0
        self._trials: tuple[int, frozenset[int]] = (-1, frozenset())  # epoch, ranks
        self._unjudged = False

    @property
    def left(self) -> bool:
        """Whether a rebuild is allowed now."""
        return self._failures <= self.limit

    @property
    def used_up(self) -> bool:
        """Whether rebuilds were allowed, and none is now."""
        return self.limit > 0 and not self.left

    def expect(self, epoch: int, ranks: Collection[int]) -> None:
        """Note that requests are on trial in these ranks in an epoch."""
        known = self._trials[1] if self._trials[0] == epoch else frozenset()
        self._trials = epoch, known.union(ranks)

    def fail(self, epoch: int | None = None, ranks: Collection[int] = ()) -> bool:
        """Count a failure, unless `judge` is to count it. Returns whether a rebuild is allowed.

        epoch, ranks   where it happened, if an epoch was served
        """
        on_trial = self._trials[1] if self._trials[0] == epoch else frozenset()
        if on_trial.isdisjoint(ranks):
            self._failures += 1
        else:
            self._unjudged = True
        return self.left

    def judge(self, by_request: bool) -> None:
        """Count the last failure if no request caused it; otherwise the failures so far count no longer."""
        if by_request:
            self._failures = 0
        elif self._unjudged:
            self._failures += 1
        self._unjudged = False

    def forget(self) -> None:
        """Note that the group has served for long."""
        self._failures = 0
