"""The events of one stream, kept for any number of readers. Knows nothing of their contents and of connections."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator

_END = b"\n\n"


class EventLog:
    """Events numbered from 0. A reader may come late, and follows until the log ends."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []  # one or more events each
        self._firsts: list[int] = []  # the number of the first event of each chunk
        self._num_events = 0
        self._ended = False
        self._changed = asyncio.Event()
        self.num_bytes = 0

    def add(self, events: bytes) -> None:
        """Add events."""
        if events:
            self._chunks.append(events)
            self._firsts.append(self._num_events)
            self._num_events += events.count(_END)
            self.num_bytes += len(events)
            self._wake()

    def end(self) -> None:
        """End the log; readers return after the last event."""
        self._ended = True
        self._wake()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yield all events with a number higher than `after`, until the log ends."""
        index = max(bisect_right(self._firsts, after + 1) - 1, 0)
        while True:
            while index < len(self._chunks):
                first, events = self._firsts[index], b"".join(self._chunks[index:])
                index = len(self._chunks)
                if first <= after:
                    events = _without(events, after + 1 - first)
                if events:
                    yield events
            if self._ended:
                return
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _without(events: bytes, num: int) -> bytes:
    """Return the events without the first `num`."""
    parts = events.split(_END, num)
    return parts[num] if len(parts) > num else b""
