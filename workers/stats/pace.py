"""How long steps take by their size, and whether the present step takes far longer. No torch, no I/O."""

import math
import time
from collections.abc import Callable

SIZES = 64
FACTOR = 8
"""A step may take this multiple of the longest one of its size, because contexts grow and machines are shared."""


class Pace:
    """The steps of one process, over all its epochs. One thread writes; any thread may call `overdue`.

    The size of a step is its number of tokens on all ranks, because each rank may compute the experts of all of them.
    Sizes are counted in powers of two.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._longest = [0.0] * SIZES  # seconds
        self._present: tuple[int, float] | None = None  # size and begin

    def begin(self, num_tokens: int) -> None:
        """Note that a step begins."""
        self._present = num_tokens.bit_length(), self._clock()

    def end(self) -> None:
        """Note that the step has ended."""
        if self._present is None:
            return
        size, began = self._present
        self._present = None
        self._longest[size] = max(self._longest[size], self._clock() - began)

    def overdue(self) -> bool:
        """Return whether the step takes FACTOR times its expected time; between two steps nothing may take long."""
        present = self._present
        if present is None:
            return True
        size, began = present
        return self._clock() - began > FACTOR * self._expected_s(size)

    def _expected_s(self, size: int) -> float:
        """Return the longest time of a step of this size, or that of the next smaller one in proportion.

        That of a larger one where none was smaller. Without any step there is no expectation.
        """
        for known in range(size, -1, -1):
            if self._longest[known]:
                return self._longest[known] * 2.0 ** (size - known)
        return next(filter(None, self._longest[size:]), math.inf)
