"""The time of a step by its rows, measured at the start and from steps in service. Pure arithmetic: no clock."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from workers.step.draft_budget import FACTOR_UNIT, SHARE_UNIT
from workers.step.step_sync import StepPlan

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
"""Weight of a step in the mean excess of steps with drafts, and in the ratio of steps to their measured times."""

RELAXATION = 0.998
"""Factor of an excess that was not measured again: from 1.10 to 1.05 it takes 350 steps."""


MOST_SIZES = 256
"""Sizes of steps of which the measured seconds are kept: those of graphs come again and again."""


class StepSize(NamedTuple):
    """What the time of a step without prompts depends on.

    rows      of the busiest rank, those of its graph included
    verifies  a rank verifies drafts
    seqs      sequences of the busiest rank that a draft model drafts tokens of; 0: it does not read the step
    drafts    tokens that it drafts of each
    """

    rows: int
    verifies: bool
    seqs: int = 0
    drafts: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> "StepSize":
        """Return the size of a step without prompts, equal on all ranks."""
        rows = plan.padded_tokens or max(plan.num_tokens_across_dp)
        seqs = plan.draft_rows if plan.draft_reads else 0
        return cls(rows, plan.verifies, seqs, plan.draft_steps)


_CURVES = ("decode", "verify", "first", "one_draft", "drafts")

Curve = tuple[tuple[int, float], ...]
"""Seconds by rows, ascending in rows; none: such forwards were not measured, and take no time."""


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of captured forwards behind no context, of the slowest rank.

    decode, verify     the model's forward, with one row a sequence and with drafts; without `verify`, as `decode`
    first              a draft model's pass over all rows
    one_draft, drafts  its further passes, which draft one token of each sequence, or `most` tokens
    """

    decode: Curve = ()
    verify: Curve = ()
    first: Curve = ()
    one_draft: Curve = ()
    drafts: Curve = ()
    most: int = 1

    def __str__(self) -> str:
        return "; ".join(
            f"{name} " + ", ".join(f"{rows}: {1e3 * seconds:.2f}" for rows, seconds in curve)
            for name in _CURVES
            if (curve := getattr(self, name))
        )

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "StepSeconds":
        """Return the times of `asdict`, as JSON carries them."""
        curves = {
            name: tuple((rows, seconds) for rows, seconds in fields[name]) for name in _CURVES
        }
        return cls(**curves, most=fields["most"])

    @classmethod
    def slowest(cls, ranks: Iterable["StepSeconds"]) -> "StepSeconds":
        """Return the longest time of any rank; all have measured the same rows."""
        found = list(ranks)
        curves = {
            name: tuple(
                (points[0][0], max(seconds for _, seconds in points))
                for points in zip(*(getattr(one, name) for one in found), strict=True)
            )
            for name in _CURVES
        }
        return cls(**curves, most=found[0].most)

    def of(
        self, rows: np.ndarray | int, verifies: bool, seqs: int = 0, drafts: int = 0
    ) -> np.ndarray:
        """Return the seconds of steps of these rows; further arguments as StepSize."""
        parts = [_interpolate((self.verify if verifies else ()) or self.decode, rows)]
        if seqs:
            parts.append(_interpolate(self.first, rows))
        if drafts:
            one, most = _interpolate(self.one_draft, seqs), _interpolate(self.drafts, seqs)
            share = (drafts - 1) / (self.most - 1) if self.most > 1 else 0.0
            parts.append(one + share * (most - one))
        return sum(parts[1:], parts[0])


@lru_cache(maxsize=16)  # of one rank; a conversion takes longer than all else here
def _arrays(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and the seconds."""
    known, seconds = np.array(curve).T
    return known, seconds


def _interpolate(curve: Curve, rows: np.ndarray | int) -> np.ndarray:
    """Return the seconds of `rows`; behind the largest they are in proportion to the rows."""
    if not curve:
        return np.zeros(np.shape(rows))
    known, seconds = _arrays(curve)
    beyond = np.maximum(1.0, rows / known[-1])
    found: np.ndarray = np.interp(rows, known, seconds) * beyond
    return found


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

    A step by its rows has the seconds that were measured at the start, times the ratio that steps in service have to
    them; without measurements, those of a line through the steps in service. What steps with drafts take beside that,
    because they run other kernels or wait for the host, is their mean excess.
    """

    def __init__(self, measured: StepSeconds | None = None) -> None:
        self._measured = measured if measured is not None and measured.decode else None
        self._seconds = lru_cache(maxsize=MOST_SIZES)(self._measured_seconds)
        self._costs = lru_cache(maxsize=MOST_SIZES)(self._measured_costs)
        self._ratio = 1.0
        self._times = StepTimes()
        self._excess = 0.0

    def observe(self, size: StepSize, seconds: float) -> None:
        """Count a step without prompts."""
        expected = self._expected(size)
        if expected is not None:
            found = min(seconds / expected, OUTLIER) - 1
            if size.verifies:
                self._excess += SMOOTHING * (found - self._excess)
            else:
                self._ratio *= 1 + SMOOTHING * found
        self._times.observe(size.rows, seconds)

    def _expected(self, size: StepSize) -> float | None:
        """Return the seconds of a step but for the excess; None: unknown."""
        if self._measured is not None:
            return max(LEAST_S, self._ratio * self._seconds(size))
        return self._times.expected(size.rows) if self._times.known else None

    def _measured_seconds(self, size: StepSize) -> float:
        assert self._measured is not None
        return float(self._measured.of(*size))

    def relax(self) -> None:
        """Take steps with drafts for a little cheaper, so that one bad measurement does not count for ever."""
        self._excess *= RELAXATION

    def vote(self) -> dict[str, int]:
        """Return the fields of this rank's Vote about the times of steps."""
        share = self._times.seconds_per_row / self._times.expected(1)
        return {
            "draft_factor": round(FACTOR_UNIT * (1 + self._excess)),
            "draft_row_share": round(SHARE_UNIT * min(1.0, share)),
        }

    def expected(self, num_decodes: int, num_drafts: int, draft_steps: int = 0) -> np.ndarray:
        """Return the costs of 1 to `num_drafts` drafts beside `num_decodes` decodes, float64 [num_drafts].

        draft_steps   tokens that a draft model drafts behind a step with drafts; 0: there is none
        """
        if self._measured is not None:
            costs_N = self._costs(num_decodes, num_drafts, draft_steps)
        else:
            alone_s, more_N = self._times.expected(num_decodes), np.arange(1, num_drafts + 1)
            costs_N = np.array(1 + self._times.seconds_per_row / alone_s * more_N)
        return (1 + self._excess) * costs_N

    def _measured_costs(self, num_decodes: int, num_drafts: int, draft_steps: int) -> np.ndarray:
        """Return `expected` of the measured seconds, without the excess."""
        measured, rows_N = self._measured, num_decodes + np.arange(1, num_drafts + 1)
        assert measured is not None
        alone_s = max(LEAST_S, float(measured.of(num_decodes, False)))
        seqs = num_decodes if draft_steps else 0
        found: np.ndarray = measured.of(rows_N, True, seqs, draft_steps) / alone_s
        return found
