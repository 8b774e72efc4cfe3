"""A change of a group that an operator requests: at most one at a time, with its outcome. Knows nothing of ranks."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Self

from workers.config import RankConfig


class ChangeError(ValueError):
    """A change that was not made; the group serves as before, or has failed for the reason in the message."""


class PendingChange:
    """The change that is under way, if there is one.

    config, reason, anew   as in `Group.change`; valid while `requested`
    """

    config: RankConfig
    reason: str
    anew: bool

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._outcome: asyncio.Future[None] | None = None

    @property
    def requested(self) -> bool:
        """Whether a change waits for a new epoch."""
        return self._begun.is_set()

    @contextmanager
    def request(self, config: RankConfig, reason: str, *, anew: bool) -> Iterator[Self]:
        """Be this change while the block runs. Raises ChangeError if another one is under way."""
        if self._outcome is not None:
            raise ChangeError(f"another change is under way: {self.reason}")
        self.config, self.reason, self.anew = config, reason, anew
        self._outcome = asyncio.get_running_loop().create_future()
        try:
            yield self
        finally:
            self._outcome.cancel()
            self._outcome = None
            self._begun.clear()

    async def provide(
        self, start: Callable[..., Awaitable[bool]], avoided: Collection[int]
    ) -> None:
        """Start the processes of the change, again while `start` returns False because a rebuild has used some.

        Raises its error, or ChangeError if the change was given up meanwhile: starts fail in many ways then.

        start, avoided   `Roster.provide` and its argument
        """
        assert self._outcome is not None, "request comes first"
        try:
            while not await start(self.config, anew=self.anew, avoided=avoided):
                if self._outcome.done():
                    break
        except Exception:
            if not self._outcome.done():
                raise
        if self._outcome.done():
            await self._outcome

    async def begins(self) -> None:
        """Return when a change is to be made."""
        await self._begun.wait()

    async def make(self) -> None:
        """Let `begins` return, and return when the change is made. Raises ChangeError if it was not made."""
        assert self._outcome is not None, "request comes first"
        self._begun.set()
        await self._outcome

    def succeed(self) -> None:
        """Note that the ranks serve after the change."""
        self._begun.clear()
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(None)

    def fail(self, reason: str) -> None:
        """Note that the change was given up; does nothing if none is under way."""
        self._begun.clear()
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_exception(ChangeError(reason))
