"""A model of the time of a step by ranks and tokens, fitted to measured steps and all-to-alls. Pure arithmetic.

    exchange   contention * (a + b (N - 1) + c T + d T remote(N))   us of a dispatch and a combine
    compute    contention * (e + f T + i [N > 1])                  ms of a step without its all-to-alls
    vote       contention * (g + h (N - 1))                        us of a step without tokens

N ranks, T tokens of a rank. remote(N): other ranks with an expert of a token, on average, if routing is uniform.
contention: ranks that share a core; 1 where each rank has a core or a GPU of its own. i: what a step of a group takes
beyond the all-to-alls timed alone, because ranks with unequal rows wait for each other in every layer.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

Features = Callable[[int, int], tuple[float, ...]]  # of ranks and tokens


@dataclass(frozen=True)
class Point:
    """A measured cell: the medians over its repeats."""

    ranks: int
    tokens: int
    step_ms: float
    exchange_us: float
    empty_step_us: float


@dataclass(frozen=True)
class Error:
    """Relative error of predictions: the mean and the largest, over `count` cells."""

    mean: float
    largest: float
    count: int

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> "Error":
        """Compare predictions with measurements."""
        errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
        return cls(float(errors.mean()), float(errors.max()), len(errors))


@dataclass(frozen=True)
class StepModel:
    """The fitted model. `cores` None: no rank shares its device."""

    exchange: tuple[float, ...]
    compute: tuple[float, ...]
    vote: tuple[float, ...]
    layers: int
    top_k: int
    cores: int | None

    @classmethod
    def fit(
        cls, points: Sequence[Point], *, layers: int, top_k: int, cores: int | None
    ) -> "StepModel":
        """Fit all three parts; `points` need one rank, and other numbers of ranks."""
        group = [point for point in points if point.ranks > 1]

        def shared(point: Point) -> float:
            return contention(point.ranks, cores)

        compute = fit_positive(
            [_compute_features(point.ranks, point.tokens) for point in points],
            [
                max(point.step_ms - layers * point.exchange_us / 1e3, 1e-6) / shared(point)
                for point in points
            ],
        )
        exchange = fit_positive(
            [_exchange_features(point.ranks, point.tokens, top_k) for point in group],
            [point.exchange_us / shared(point) for point in group],
        )
        vote = fit_positive(
            [(1.0, point.ranks - 1) for point in group],
            [point.empty_step_us / shared(point) for point in group],
        )
        return cls(exchange, compute, vote, layers, top_k, cores)

    def exchange_us(self, ranks: int, tokens: np.ndarray, contended: bool = True) -> np.ndarray:
        """Return the time of one all-to-all, by tokens [...]."""
        one, per_rank, per_token, per_row = self.exchange
        remote = remote_ranks(ranks, self.top_k)
        found: np.ndarray = one + per_rank * (ranks - 1) + (per_token + per_row * remote) * tokens
        return found * self._shared(ranks, contended)

    def compute_ms(self, ranks: int, tokens: np.ndarray, contended: bool = True) -> np.ndarray:
        """Return the time of a step without its all-to-alls, by tokens [...]."""
        one, per_token, of_group = self.compute
        found: np.ndarray = one + per_token * tokens + of_group * (ranks > 1)
        return found * self._shared(ranks, contended)

    def vote_us(self, ranks: int, contended: bool = True) -> float:
        """Return the time of a step without tokens."""
        return (self.vote[0] + self.vote[1] * (ranks - 1)) * self._shared(ranks, contended)

    def step_ms(self, ranks: int, tokens: np.ndarray, contended: bool = True) -> np.ndarray:
        """Return the time of a step in which all ranks have `tokens` [...]."""
        exchange = self.layers * self.exchange_us(ranks, tokens, contended) / 1e3
        return self.compute_ms(ranks, tokens, contended) + exchange

    def exchange_error(self, points: Sequence[Point]) -> Error:
        """Return the error of the all-to-all at these points."""
        predicted = [float(self.exchange_us(p.ranks, np.asarray(p.tokens))) for p in points]
        return Error.of(predicted, [point.exchange_us for point in points])

    def step_error(self, points: Sequence[Point]) -> Error:
        """Return the error of whole steps at these points."""
        predicted = [float(self.step_ms(p.ranks, np.asarray(p.tokens))) for p in points]
        return Error.of(predicted, [point.step_ms for point in points])

    def _shared(self, ranks: int, contended: bool) -> float:
        return contention(ranks, self.cores) if contended else 1.0


def contention(ranks: int, cores: int | None) -> float:
    """Return the ranks that share a core."""
    return 1.0 if cores is None else max(1.0, ranks / cores)


def remote_ranks(ranks: int, top_k: int) -> float:
    """Return the mean number of other ranks with one of a token's experts."""
    return (ranks - 1) * (1 - (1 - 1 / ranks) ** top_k)


def split(points: Sequence[Point], held_back: Collection[int]) -> tuple[list[Point], list[Point]]:
    """Return the points that the fit sees, and those held back."""
    seen = [point for point in points if point.tokens not in held_back]
    return seen, [point for point in points if point.tokens in held_back]


def fit_positive(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Return coefficients of at least 0 with the least squares of relative errors.

    Columns with a negative coefficient are left out, one after another; the rest is fitted again.
    """
    y = np.asarray(values, float)
    x = np.asarray(rows, float) / y[:, None]
    kept = list(range(x.shape[1]))
    while kept:
        found, *_ = np.linalg.lstsq(x[:, kept], np.ones(len(y)), rcond=None)
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    coefficients = [0.0] * x.shape[1]
    for column, value in zip(kept, found if kept else (), strict=True):
        coefficients[column] = float(value)
    return tuple(coefficients)


def _compute_features(ranks: int, tokens: int) -> tuple[float, ...]:
    return 1.0, tokens, float(ranks > 1)


def _exchange_features(ranks: int, tokens: int, top_k: int) -> tuple[float, ...]:
    return 1.0, ranks - 1, tokens, tokens * remote_ranks(ranks, top_k)
