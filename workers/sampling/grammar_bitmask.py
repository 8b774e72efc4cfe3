"""Computes which tokens constrained rows may have next, beside the model's forward. Knows nothing of requests.

G constrained rows of a batch, W = ceil(V / 32) words of 32 tokens, V vocabulary.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from workers.sampling.grammar import Grammar
from workers.sampling.logits_processors import GrammarBitmask

_MAX_THREADS = 8


class PendingBitmask:
    """A GrammarBitmask that is being computed."""

    def __init__(self, rows: list[int], words: "Future[np.ndarray]"):
        self._rows = rows
        self._words = words

    def wait(self) -> GrammarBitmask:
        """The mask; by then the forward has mostly covered its cost."""
        return GrammarBitmask(torch.tensor(self._rows), torch.from_numpy(self._words.result()))


class GrammarBitmasks:
    """Computes masks beside the forward."""

    def __init__(self, vocab_size: int, num_threads: int):
        self._num_words = -(-vocab_size // 32)
        self._num_threads = min(num_threads, _MAX_THREADS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-mask")
        self._executor: LLExecutor | None = None

    def start(self, grammars: Iterable[Grammar | None]) -> PendingBitmask | None:
        """Compute what each row of a batch may have next; None when no row has a grammar.

        The grammars may not advance before `wait` has returned.
        """
        rows, matchers = [], []
        for row, grammar in enumerate(grammars):
            if grammar is not None:
                matchers.append((grammar.matcher, len(rows)))
                rows.append(row)
        if not rows:
            return None
        return PendingBitmask(rows, self._thread.submit(self._fill, matchers))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fill(self, matchers: list[tuple[LLMatcher, int]]) -> np.ndarray:
        """int32 [G, W]; the interpreter lock is free meanwhile."""
        if self._executor is None:  # starts threads, which most ranks never need
            self._executor = LLExecutor(self._num_threads)
        words_GW = np.zeros((len(matchers), self._num_words), dtype=np.int32)
        fill_next_token_bitmask_par(self._executor, matchers, words_GW)
        return words_GW
