"""How many drafts of each sequence a step verifies: those that most likely survive. Pure arithmetic.

S sequences with drafts, K the most drafts of one, N drafts of all.
"""

from collections.abc import Callable

import numpy as np

PRIOR = 0.5
"""Share of right guesses that is expected before the first guess of any sequence."""

PRIOR_GUESSES = 2.0

DECAY = 0.9
"""Weight of a guess against the next one of its sequence: about ten guesses count."""

DECAY_OF_ALL = 0.99
"""The same of all sequences together."""

LEAST_COST = 1.0
"""No step with drafts counts as faster than a step without, whatever the noise of its measurement."""

LEAST_SURVIVAL = 0.1
"""No step verifies a draft that less likely survives, even in rows that its rank has to spare: experts read more."""


class Acceptance:
    """The running share of right guesses, of one sequence or of all."""

    __slots__ = ("_decay", "_guesses", "_right")

    def __init__(self, prior: float = PRIOR, decay: float = DECAY) -> None:
        """`prior`: the share before any guess, with the weight of PRIOR_GUESSES."""
        self._decay = decay
        self._guesses, self._right = PRIOR_GUESSES, prior * PRIOR_GUESSES

    def count(self, right: int, wrong: int) -> None:
        """Count guesses of one step, as if right and wrong ones were mixed evenly."""
        number = right + wrong
        if not number:
            return
        left = self._decay**number
        counted = (1 - left) / (1 - self._decay)
        self._guesses = left * self._guesses + counted
        self._right = left * self._right + counted * right / number

    @property
    def share(self) -> float:
        """The probability that the next guess is right."""
        return self._right / self._guesses


def expected_shares(share_S: np.ndarray, of_all: float) -> np.ndarray:
    """Return what to expect of the next guesses of sequences with these shares of right guesses, float64 [S].

    The last guesses of a sequence are few. So its share counts as far as the shares differ from the share `of_all` by
    more than chance (a James-Stein estimate): a few wrong guesses of one sequence end no drafts, and a few right ones
    begin none.
    """
    chance = of_all * (1 - of_all) * (1 - DECAY) / (1 + DECAY)  # variance of one sequence's share
    away_S = share_S - of_all
    spread = float((away_S**2).mean()) if len(away_S) else 0.0
    if spread <= chance:
        return np.full(len(share_S), of_all)
    expected_S: np.ndarray = of_all + (1 - chance / spread) * away_S
    return expected_S.clip(0, 1)


def survivals(acceptance_S: np.ndarray, available_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the drafts that most likely survive, these first: sequence int64 [N], probability float64 [N].

    A draft survives if its guess and all before it are right.

    acceptance_S   float64, probability that a guess is right
    available_S    int64, drafts that there are
    """
    depths_SK = np.arange(1, available_S.max(initial=0) + 1)
    survival_SK = acceptance_S[:, None] ** depths_SK
    there_SK = (depths_SK <= available_S[:, None]) & (survival_SK >= LEAST_SURVIVAL)
    seq_N, survival_N = there_SK.nonzero()[0], survival_SK[there_SK]
    order_N = (-survival_N).argsort(kind="stable")
    return seq_N[order_N], survival_N[order_N]


def likeliest_depths(acceptance_S: np.ndarray, available_S: np.ndarray, most: int) -> np.ndarray:
    """Return the number of drafts of each sequence, int64 [S]: `most` together, of those that most likely survive.

    Arguments as in survivals.
    """
    if int(available_S.sum()) <= most and (acceptance_S**available_S >= LEAST_SURVIVAL).all():
        return available_S
    seq_N, _ = survivals(acceptance_S, available_S)
    return np.bincount(seq_N[: max(0, most)], minlength=len(acceptance_S))


def choose_passes(
    acceptance_S: np.ndarray,
    most: int,
    num_decodes: int,
    costs: Callable[[int], np.ndarray],
) -> int:
    """Return how many tokens a draft model is to draft of each sequence, 1 to `most`.

    acceptance_S, num_decodes   as in choose_depths
    costs(count)                its costs_N, with passes that draft `count` tokens behind each step with drafts
    """
    rates = []
    for count in range(1, most + 1):
        costs_N = costs(count)
        available_S = np.full(len(acceptance_S), count)
        depths_S = choose_depths(acceptance_S, available_S, num_decodes, costs_N)
        places_SK = np.arange(1, count + 1) <= depths_S[:, None]
        survival_SK = acceptance_S[:, None] ** np.arange(1, count + 1)
        tokens, num_drafts = num_decodes + survival_SK[places_SK].sum(), int(depths_S.sum())
        rates.append(tokens / max(LEAST_COST, costs_N[num_drafts - 1]) if num_drafts else 0.0)
    return 1 + int(np.argmax(rates))


def choose_depths(
    acceptance_S: np.ndarray,
    available_S: np.ndarray,
    num_decodes: int,
    costs_N: np.ndarray,
) -> np.ndarray:
    """Return the number of drafts of each sequence on a rank alone, int64 [S].

    A step's expected tokens are `num_decodes` and the sum of the survivals of its drafts.

    acceptance_S, available_S   as in survivals
    num_decodes    sequences that decode in the step, with drafts or without
    costs_N        float64, expected time of a step with 1 to N drafts; that of a step without is 1
    """
    seq_N, survival_N = survivals(acceptance_S, available_S)
    seq_N, survival_N = seq_N[: len(costs_N)], survival_N[: len(costs_N)]
    if not len(seq_N):
        return np.zeros(len(acceptance_S), dtype=np.int64)
    tokens_N = num_decodes + survival_N.cumsum()
    rates_N = tokens_N / np.maximum(costs_N[: len(seq_N)], LEAST_COST)
    best = int(rates_N.argmax())
    count = best + 1 if rates_N[best] > num_decodes else 0
    return np.bincount(seq_N[:count], minlength=len(acceptance_S))
