"""The limit of a stage that may take any time, such as a download: it ends when no rank reports progress any more."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from cluster.supervisor.failures import StageTimeoutError
from cluster.supervisor.ray_calls import result_future
from kernels.host.awake import LOOKS, AwakeTime

T = TypeVar("T")


async def while_moving(work: Awaitable[T], ranks: Sequence[Any], limit_s: float) -> T:
    """Return the result of `work`.

    Raises StageTimeoutError, and cancels `work`, after `limit_s` seconds in which the `progress` of no rank changed. A
    rank without an answer makes none. A pause of this process does not count.
    """
    clock = asyncio.get_running_loop().time
    running, reports = asyncio.ensure_future(work), _Reports(ranks)
    awake = AwakeTime(limit_s / LOOKS, clock)
    try:
        while (left_s := limit_s - awake.look()) > 0:
            await asyncio.wait({running}, timeout=min(left_s, awake.longest_s))
            if running.done():
                return running.result()
            if reports.changed():
                awake = AwakeTime(limit_s / LOOKS, clock)
        raise StageTimeoutError(
            f"no rank reported progress for {limit_s:g} s; cluster.start_timeout_s allows more"
        )
    finally:
        reports.close()
        running.cancel()


class _Reports:
    """The last progress of each rank."""

    def __init__(self, ranks: Sequence[Any]):
        self._ranks = ranks
        self._known: list[tuple[int, int] | None] = [None] * len(ranks)
        self._calls = [result_future(rank.progress.remote()) for rank in ranks]

    def changed(self) -> bool:
        """Return whether a rank has reported something new since the last call."""
        before = self._known.copy()
        for index, call in enumerate(self._calls):
            if call.done():
                if call.exception() is None:
                    self._known[index] = call.result()
                self._calls[index] = result_future(self._ranks[index].progress.remote())
        return self._known != before

    def close(self) -> None:
        """Wait for no more answers."""
        for call in self._calls:
            call.cancel()
