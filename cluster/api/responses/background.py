"""A response that runs in a task of its own, without the connection of its request. Knows nothing of HTTP."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.api.answer.generation import Choice
from cluster.api.responses.event_log import EventLog
from cluster.api.responses.writer import ResponseWriter
from cluster.api.run import Emit
from cluster.errors import ServingError
from kernels.host.owned import OwnedTask

logger = logging.getLogger(__name__)


class BackgroundJob:
    """The run of one response. log: its events, if the client wants a stream."""

    def __init__(self, writer: ResponseWriter, *, streams: bool) -> None:
        self._writer = writer
        self._in_progress = False
        self._task: OwnedTask | None = None
        self.log = EventLog() if streams else None

    def start(self, run: Callable[[Emit], Awaitable[None]]) -> None:
        """Start `run`, which passes the text of each output to its argument."""
        self._add(self._writer.queued())
        self._task = OwnedTask(self._run(run), self._fail, "background-response", may_end=True)

    async def cancel(self) -> None:
        """Stop the run and wait until its ranks are free. Without effect after the end."""
        if self._task is not None and not self._task.done:
            await self._task.close()

    async def _run(self, run: Callable[[Emit], Awaitable[None]]) -> None:
        writer = self._writer
        try:
            await run(self._emit)
            self._add(writer.end())
        except asyncio.CancelledError:
            writer.cancel()
        except Exception as error:
            self._fail(error)
        finally:
            if self.log is not None:
                self.log.end()

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, ServingError):
            logger.error("a response in the background broke", exc_info=error)
            error = ServingError("internal error; the server's log has the details")
        self._add(self._writer.error(error))

    def _emit(self, choice: Choice, text: str) -> None:
        if not self._in_progress:
            self._in_progress = True
            self._add(self._writer.progressed())
        self._add(self._writer.text(choice, text))

    def _add(self, events: bytes) -> None:
        if self.log is not None:
            self.log.add(events)
