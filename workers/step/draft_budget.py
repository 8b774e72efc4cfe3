"""The rows up to which every rank adds drafts to the next step, from the votes of all ranks. Pure arithmetic.

A step of the group takes the time of its busiest rank. So the ranks agree on one number, the rows of a rank, and each
rank verifies the drafts that most likely survive in the rows that its decodes leave. All numbers but the last quotient
are integers, so the result is equal on all ranks.

N ranks, M numbers of rows, P parts of a rank's drafts, C drafts of a rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

PARTS = 8
"""Parts into which a rank cuts its drafts, the most likely ones first; a vote has the mean survival of each."""

GAIN_BITS = 7
GAIN_UNIT = (1 << GAIN_BITS) - 1
"""Survivals are in units of 1 / GAIN_UNIT, rounded down, so that no drafts seem better than they are."""

FACTOR_UNIT = 1024
"""Unit of `Vote.draft_factor`."""

SHARE_UNIT = 1 << 20
"""Unit of `Vote.draft_row_share`."""

NS = 1e9
MOST_SIZES = 32
"""Numbers of rows that are compared where no graphs give them."""

_PARTS_P = np.arange(PARTS)
_SHIFTS_P = GAIN_BITS * _PARTS_P


class Table(Protocol):
    """Measured seconds of steps."""

    def of(
        self, rows: np.ndarray | int, verifies: bool, seqs: int = 0, drafts: int = 0
    ) -> np.ndarray:
        """Return the seconds of steps of these rows; see StepSeconds."""


def packed_gains(survival_C: np.ndarray) -> int:
    """Return `Vote.draft_gains` of drafts with these survivals, float64 [C], descending."""
    if not len(survival_C):
        return 0
    starts = np.arange(0, len(survival_C), _width(len(survival_C)))
    counts = np.diff(starts, append=len(survival_C))
    gains = (GAIN_UNIT * np.add.reduceat(survival_C, starts) / counts).astype(np.int64)
    return int((gains << _SHIFTS_P[: len(gains)]).sum())


def _width(num_drafts: int) -> int:
    """Return the drafts of each part but the last, which may have fewer."""
    return -(-num_drafts // PARTS)


class DraftVotes(NamedTuple):
    """Votes of all ranks about the drafts of the next step; no launch waits for what follows from them.

    columns   as of DraftBudget.limit
    """

    budget: "DraftBudget"
    columns: Mapping[str, list[int]]

    def limit(self) -> int | None:
        """See DraftBudget."""
        return self.budget.limit(self.columns)


@dataclass(frozen=True, eq=False)  # a hash of all fields would take longer than the rest
class DraftBudget:
    """Chooses the rows; equal on all ranks.

    sizes    rows of the graphs of steps with drafts, ascending; none: steps have any number of rows
    decodes  rows of the graphs of steps without drafts, ascending
    table    times that all ranks have agreed on; None: a step's time is a line with the slope that ranks vote
    """

    sizes: tuple[int, ...] = ()
    decodes: tuple[int, ...] = ()
    table: Table | None = None

    def limit(self, columns: Mapping[str, list[int]]) -> int | None:
        """Return the rows of decodes and drafts on every rank in the next step; 0: no drafts; None: no rank has any.

        columns   fields of the votes, each of all ranks

        The rows maximise expected tokens per second: tokens of all ranks, over the time of the rank with most rows.
        """
        if not any(columns["drafts"]):
            return None
        votes = (tuple(columns[name]) for name in ("draft_rows", "drafts", "draft_gains"))
        costs = (max(columns[name]) for name in ("draft_passes", "draft_factor", "draft_row_share"))
        return self._best(*votes, *costs)

    @lru_cache(maxsize=64)  # noqa: B019 - as of `_times`; ranks change their votes about drafts now and then
    def _best(
        self,
        decodes: tuple[int, ...],
        drafts: tuple[int, ...],
        gains: tuple[int, ...],
        passes: int,
        factor: int,
        row_share: int,
    ) -> int:
        """Return the rows for fields of the votes of all ranks, and the largest value of the other fields."""
        decodes_N, drafts_N, gains_N = np.array((decodes, drafts, gains))
        most, top = int(decodes_N.max()), int((decodes_N + drafts_N).max())
        if self.table is None:
            rows_M, alone = _numbers(most, top), SHARE_UNIT + row_share * (most - 1)
            times_M = SHARE_UNIT + row_share * (rows_M - 1)
        else:
            rows_M, times_M, alone = self._times(most, top, passes)
        if not len(rows_M):
            return 0
        # Steps of more rows take no less time, and steps with drafts none less than steps without.
        times_M = np.maximum(times_M * factor // FACTOR_UNIT, alone)
        tokens = GAIN_UNIT * sum(decodes)
        tokens_M = tokens + _gains(rows_M[:, None] - decodes_N, drafts_N, gains_N)
        rates_M = tokens_M / times_M
        best = int(rates_M.argmax())
        return int(rows_M[best]) if rates_M[best] > tokens / alone else 0

    @lru_cache(maxsize=64)  # noqa: B019 - a process has few budgets, and numbers of sequences come again
    def _times(self, decodes: int, top: int, passes: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return rows of steps with drafts and their nanoseconds, int64 [M] ascending, and those of a step without.

        top      rows of the rank with most decodes and drafts; no step has more, but for padding
        passes   tokens that a draft model drafts of each sequence behind a step with drafts
        """
        rows_M = _numbers(decodes, top)
        if self.sizes:
            last = padded(self.sizes, top)
            rows_M = np.array([it for it in self.sizes if decodes <= it <= last], dtype=np.int64)
        assert self.table is not None, "without a table times are a line"
        alone = self.table.of(padded(self.decodes, decodes), False)
        seconds_M = self.table.of(rows_M, True, decodes if passes else 0, passes)
        times_M = (NS * np.maximum.accumulate(seconds_M)).round().astype(np.int64)
        return rows_M, times_M.clip(1), max(1, round(NS * float(alone)))


def _numbers(low: int, high: int) -> np.ndarray:
    """Return numbers from `low` to `high`, int64 [M], ascending: all, or every n-th of many."""
    step = -(-(high - low) // MOST_SIZES) or 1
    return np.append(np.arange(low, high, step), high)


def padded(sizes: tuple[int, ...], rows: int) -> int:
    """Return the smallest of ascending `sizes` that has `rows` rows; beyond them, `rows`."""
    return next((size for size in sizes if rows <= size), rows)


def _gains(room_MN: np.ndarray, drafts_N: np.ndarray, gains_N: np.ndarray) -> np.ndarray:
    """Return the expected tokens of the drafts that fit in the room of the ranks, in units of 1 / GAIN_UNIT, [M]."""
    width_N1 = -(-drafts_N // PARTS)[:, None]
    gain_NP = (gains_N[:, None] >> _SHIFTS_P) & GAIN_UNIT
    room_MN1 = np.minimum(room_MN, drafts_N)[:, :, None]
    taken_MNP = np.minimum(np.maximum(room_MN1 - width_N1 * _PARTS_P, 0), width_N1)
    found: np.ndarray = (taken_MNP * gain_NP).sum((1, 2))
    return found
