"""How many drafts of each sequence a step verifies: as many as raise tokens per second. Pure arithmetic.

S sequences with drafts, K the most drafts of one.
"""

import math
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

NUM_SHARES = 41
"""Shares from 0 to 1 that are tried for the least that pays."""


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


def least_share(costs_K: np.ndarray) -> float:
    """Return the least share of right guesses with which some number of drafts of every sequence pays; inf: none pays.

    costs_K   float64, expected time of a step with 1 to K drafts of every sequence; that of a step without is 1
    """
    shares_S = np.linspace(0, 1, NUM_SHARES)
    tokens_SK = 1 + (shares_S[:, None] ** np.arange(1, len(costs_K) + 1)).cumsum(1)
    pays_S = (tokens_SK > np.maximum(costs_K, LEAST_COST)).any(1)
    return float(shares_S[pays_S.argmax()]) if pays_S.any() else math.inf


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
    """Return the number of drafts of each sequence, int64 [S].

    A draft survives if its guess and all before it are right, so a step's expected tokens are `num_decodes` and the sum
    of the survivals of its drafts. The drafts that most likely survive come first.

    acceptance_S   float64, probability that a guess is right
    available_S    int64, drafts that there are
    num_decodes    sequences that decode in the step, with drafts or without
    costs_N        float64, expected time of a step with 1 to N drafts; that of a step without is 1
    """
    depths_SK = np.arange(1, available_S.max(initial=0) + 1)
    survival_SK = acceptance_S[:, None] ** depths_SK
    there_SK = depths_SK <= available_S[:, None]
    seq_N, survival_N = there_SK.nonzero()[0], survival_SK[there_SK]
    order_N = (-survival_N).argsort(kind="stable")[: len(costs_N)]
    if not len(order_N):
        return np.zeros(len(acceptance_S), dtype=np.int64)
    tokens_N = num_decodes + survival_N[order_N].cumsum()
    rates_N = tokens_N / np.maximum(costs_N[: len(order_N)], LEAST_COST)
    best = int(rates_N.argmax())
    count = best + 1 if rates_N[best] > num_decodes else 0
    return np.bincount(seq_N[order_N[:count]], minlength=len(acceptance_S))
