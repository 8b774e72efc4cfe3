"""Threads and asyncio tasks that run for an owner: an unexpected end reaches the owner with its reason.

Nothing ends silently. The owner decides what the reason ends: itself, an epoch, a group. Knows nothing of owners.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

Failed = Callable[[BaseException], None]


class EndedError(RuntimeError):
    """A task that runs until its owner cancels it has returned."""


class OwnedTask:
    """Work in the running event loop.

    failed    called once in the loop, with the error that ended the work; never after `cancel` or at the loop's end
    may_end   the work may return; otherwise a return is an EndedError
    """

    def __init__(
        self, work: Coroutine[Any, Any, Any], failed: Failed, name: str, *, may_end: bool = False
    ):
        self._failed, self._may_end, self._cancelled = failed, may_end, False
        self._task = asyncio.create_task(work, name=name)
        self._task.add_done_callback(self._end)

    @property
    def done(self) -> bool:
        """Whether the work has ended."""
        return self._task.done()

    def cancel(self) -> None:
        """Cancel the work, because its owner ends."""
        self._cancelled = True
        self._task.cancel()

    async def wait(self) -> None:
        """Return when the work has ended."""
        await asyncio.wait([self._task])

    async def close(self) -> None:
        """Cancel the work and wait for its end."""
        self.cancel()
        await self.wait()

    def _end(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None and not self._may_end:
            error = EndedError(f"{task.get_name()} has returned")
        if error is not None and not self._cancelled:
            self._failed(error)


def start_thread(work: Callable[[], object], failed: Failed, name: str) -> threading.Thread:
    """Run `work` in a new daemon thread, which calls `failed` with the error that ends `work`, if any."""
    thread = threading.Thread(target=_run, args=(work, failed), name=name, daemon=True)
    thread.start()
    return thread


def _run(work: Callable[[], object], failed: Failed) -> None:
    try:
        work()
    except BaseException as error:
        failed(error)
