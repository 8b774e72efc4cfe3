"""The time of a step by its rows, from steps in service. Pure arithmetic: no clock."""

import numpy as np

DECAY = 0.98
"""Weight of a step in the averages, against the step after it: the last 50 steps count for most."""

OUTLIER = 3
"""A step counts as at most this multiple of its expected time."""

ROW_SHARE = 0.3
"""Share of a step's time that is in proportion to its rows, as long as steps of different sizes were not measured."""

PRIOR_VARIANCE = 0.1
"""Variance of rows from which measurements count as much as ROW_SHARE."""

LEAST_S = 1e-9
"""Least expected time: a line through the origin has none for no rows."""

SMOOTHING = 0.1
"""Weight of a step with drafts in their mean excess."""

RELAXATION = 0.998
"""Factor of an excess that was not measured again: from 1.10 to 1.05 it takes 350 steps."""


class StepTimes:
    """A line through the times of steps without prompts: a fixed time, and a time for each row of the busiest rank."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._seconds = 0.0  # weighted means
        self._variance = self._covariance = 0.0

    @property
    def known(self) -> bool:
        """Whether a step was measured."""
        return self._weight > 0

    def observe(self, rows: int, seconds: float) -> None:
        """Count a step."""
        if self.known:
            seconds = min(seconds, OUTLIER * self.expected(rows))
        self._weight = DECAY * self._weight + 1
        share = 1 / self._weight
        before = rows - self._rows
        self._rows += share * before
        self._seconds += share * (seconds - self._seconds)
        self._variance += share * (before * (rows - self._rows) - self._variance)
        self._covariance += share * (before * (seconds - self._seconds) - self._covariance)

    @property
    def seconds_per_row(self) -> float:
        """The slope of the line, never below 0; the fixed time is not below 0 either."""
        if not self.known:
            return ROW_SHARE
        steepest = self._seconds / self._rows
        prior = ROW_SHARE * steepest
        measured = self._covariance + PRIOR_VARIANCE * prior
        return min(max(measured / (self._variance + PRIOR_VARIANCE), 0.0), steepest)

    def expected(self, rows: float) -> float:
        """Return the expected seconds of a step; without measurements, in an unknown unit."""
        if not self.known:
            return 1 - ROW_SHARE + ROW_SHARE * rows
        return max(LEAST_S, self._seconds + self.seconds_per_row * (rows - self._rows))


class DraftCosts:
    """The time of a step with drafts, in multiples of the step without.

    The line through all steps has the cost of more rows. What steps with drafts take beside it, because they run other
    kernels, is their mean excess.
    """

    def __init__(self) -> None:
        self._times = StepTimes()
        self._excess = 0.0

    def observe(self, rows: int, num_drafts: int, seconds: float) -> None:
        """Count a step without prompts: rows of the busiest rank, and drafts of this rank."""
        if num_drafts and self._times.known:
            found = min(seconds / self._times.expected(rows), OUTLIER) - 1
            self._excess += SMOOTHING * (found - self._excess)
        self._times.observe(rows, seconds)

    def relax(self) -> None:
        """Take steps with drafts for a little cheaper, so that one bad measurement does not count for ever."""
        self._excess *= RELAXATION

    def expected(self, num_decodes: int, num_drafts: int) -> np.ndarray:
        """Return the costs of 1 to `num_drafts` drafts beside `num_decodes` decodes, float64 [num_drafts]."""
        alone_s, per_row_s = self._times.expected(num_decodes), self._times.seconds_per_row
        return (1 + self._excess) * (1 + per_row_s / alone_s * np.arange(1, num_drafts + 1))
