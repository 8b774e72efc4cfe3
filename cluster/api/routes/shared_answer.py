"""An answer that many requests share for a short time. Knows nothing of its content."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """The answer of `make`, which reads figures of the ranks: made once at a time, and kept for `fresh_s` seconds.

    An error is shared by the requests that wait for it, and not kept.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], fresh_s: float) -> None:
        self._make = make
        self._fresh_s = fresh_s
        self._answer: list[T] = []
        self._made = -float("inf")
        self._making: asyncio.Task[None] | None = None

    async def get(self) -> T:
        """Return the answer. Raises what `make` raises."""
        if not self._answer or time.monotonic() - self._made >= self._fresh_s:
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(self._renew())
            await asyncio.shield(self._making)
        return self._answer[0]

    async def _renew(self) -> None:
        self._answer = [await self._make()]
        self._made = time.monotonic()
