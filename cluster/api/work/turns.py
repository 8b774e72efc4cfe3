"""Places for work that callers get in turn. Knows nothing of the work."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A number of places; work of a caller waits behind its own work, and once at most for each other caller."""

    def __init__(self, num_places: int) -> None:
        self._free = num_places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def place(self, caller: str) -> AsyncIterator[None]:
        """Hold a place meanwhile."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place came at the same time
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give a place to the first work of the next caller; that caller's other work goes to the end."""
        while self._waiting:
            caller, works = self._waiting.popitem(last=False)
            turn = works.popleft()
            if works:
                self._waiting[caller] = works
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
