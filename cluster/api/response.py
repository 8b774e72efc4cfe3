"""Sends the answer of a generation: an ASGI response, whole or as a stream of server-sent events.

One task runs the generation, a second task waits for the client to disconnect; the end of either ends both. Headers
leave with the first token, so that a request that the engine refuses gets its status. Knows nothing of parsing.
"""

import asyncio
import logging
from collections.abc import Awaitable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.admission import BODY_SEND
from cluster.api.answer.generation import Choice, Generation
from cluster.api.answer.writer import AnswerWriter
from cluster.api.backend import EngineBackend
from cluster.api.record import Recorder
from cluster.api.run import GenerationRun
from cluster.errors import ServingError

logger = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a reverse proxy must not hold tokens back
]


class GenerationResponse(Response):
    """Answers one generation request. Errors before the first byte are raised, not sent."""

    def __init__(
        self,
        generation: Generation,
        writer: AnswerWriter,
        backend: EngineBackend,
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._backend = backend
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the answer until it is complete or the client disconnects."""
        generation = self._generation
        record = self._recorder.begin(generation, scope)
        run = GenerationRun(generation, self._backend, record)
        answer = self._stream(run, scope, send) if generation.stream else self._whole(run, send)
        work = asyncio.create_task(answer)
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            running = [task for task in (work, gone) if task.cancel()]
            await asyncio.gather(*running, return_exceptions=True)
            record.end(None if work.cancelled() else work.exception())
        if not work.cancelled():
            work.result()  # raises what the generation raised

    async def _whole(self, run: GenerationRun, send: Send) -> None:
        body = await run.body(self._writer)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode("ascii")),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, run: GenerationRun, scope: Scope, send: Send) -> None:
        writer = self._writer
        send_body = send
        opened: set[int] = set()

        async def begin(choice: Choice, text: str) -> None:
            nonlocal send_body
            if not opened:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
                )
                send_body = scope.get(BODY_SEND, send)
            opened.add(choice.index)
            body = writer.begin(choice, choice.echo + text)
            await send_body({"type": "http.response.body", "body": body, "more_body": True})

        def emit(choice: Choice, text: str) -> Awaitable[None] | None:
            # No coroutine of its own, because it runs for every token of a stream.
            if choice.index not in opened:
                return begin(choice, text)
            body = writer.text(choice, text)
            if not body:
                return None
            return send_body({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await run.stream(emit)
            last = writer.end()
        except Exception as error:
            if not opened:
                raise
            if not isinstance(error, ServingError):
                logger.exception("stream %s broke", self._generation.response_id)
                error = ServingError("internal error; the server's log has the details")
            last = writer.error(error)
        await send({"type": "http.response.body", "body": last})


async def _wait_for_disconnect(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
