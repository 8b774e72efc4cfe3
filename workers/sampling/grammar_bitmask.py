"""Computes the tokens that grammars allow next, beside the model's forward. Knows nothing of requests.

G constrained rows of a batch, W = ceil(V / 32) words of 32 tokens, V vocabulary.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from workers.sampling.token_bitmask import TokenBitmask
from workers.step.grammar import Grammar

_Matcher = tuple[LLMatcher, int, list[int]]  # with its first row of the mask, and drafts

_MAX_THREADS = 8


class PendingBitmask:
    """A TokenBitmask that is being computed."""

    def __init__(self, rows: list[int], words: "Future[np.ndarray]"):
        self._rows = rows
        self._words = words

    def wait(self) -> TokenBitmask:
        """Return the mask; the forward usually covers the time to compute it."""
        return TokenBitmask(torch.tensor(self._rows), torch.from_numpy(self._words.result()))


class GrammarBitmasks:
    """Computes bitmasks on a thread of its own."""

    def __init__(self, vocab_size: int, num_threads: int):
        self._num_words = -(-vocab_size // 32)
        self._num_threads = min(num_threads, _MAX_THREADS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-mask")
        self._executor: LLExecutor | None = None

    def start(
        self, seqs: Iterable[tuple[Grammar | None, tuple[int, ...]]]
    ) -> PendingBitmask | None:
        """Compute the tokens that grammars allow in each row; None if no row has a grammar.

        seqs   of each sequence its grammar, and the drafts that this allows: it has one row, and one more for each
               draft, in which the grammar is where the draft leaves it. No grammar advances.

        The grammars may not advance before `wait` has returned.
        """
        rows: list[int] = []
        matchers: list[_Matcher] = []
        row = 0
        for grammar, drafts in seqs:
            end = row + 1 + len(drafts)
            if grammar is not None:
                matchers.append((grammar.matcher, len(rows), list(drafts)))
                rows.extend(range(row, end))
            row = end
        if not rows:
            return None
        return PendingBitmask(rows, self._thread.submit(self._fill, matchers, len(rows)))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fill(self, matchers: list[_Matcher], num_rows: int) -> np.ndarray:
        """Return int32 [G, W]. llguidance releases the interpreter lock meanwhile."""
        if (
            self._executor is None
        ):  # created late, because it starts threads that most ranks never need
            self._executor = LLExecutor(self._num_threads)
        words_GW = np.zeros((num_rows, self._num_words), dtype=np.int32)
        single = [(matcher, row) for matcher, row, drafts in matchers if not drafts]
        if single:
            fill_next_token_bitmask_par(self._executor, single, words_GW)
        drafted = [one for one in matchers if one[2]]
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, words_GW)
        return words_GW
