"""The sender of a request, as its preparation sees it. Knows nothing of keys."""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Sender:
    """A client, or an offline run by default.

    name      by which work is shared fairly
    key       of a client with limits; empty for operators and without keys
    salt      prefixes in the cache are shared among requests with an equal one
    routes    may choose priority and rank
    receive   reports the end of the connection, once the body is read; None = there is no connection
    """

    name: str = ""
    key: str = ""
    salt: str = ""
    routes: bool = True
    request_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    receive: Receive | None = None

    async def while_connected(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of the work; cancel it and raise ClientDisconnect if the client leaves before."""
        if self.receive is None:
            return await work
        task, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(self.receive))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            running = [each for each in (task, gone) if each.cancel()]
            await asyncio.gather(*running, return_exceptions=True)
        if task.cancelled():
            raise ClientDisconnect
        return task.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
