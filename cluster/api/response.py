"""Runs a generation and sends its answer: an ASGI response, whole or as a stream of server-sent events.

One task runs the generation, a second task waits for the client to disconnect; the end of either ends both.
The early end of a choice closes its generator, which aborts the request in its rank. Headers leave with the first
token, so that a request that the engine refuses gets its status. Knows nothing of parsing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.admission import BODY_SEND
from cluster.api.answer.detailed_events import DetailedEventWriter
from cluster.api.answer.events import DONE, EventWriter, error_event, full_body
from cluster.api.answer.generation import Choice, Generation
from cluster.api.backend import EngineBackend
from cluster.api.record import Recorder, RequestRecord
from cluster.errors import BadRequestError, EngineDeadError, ServingError
from workers.sampling.grammar import GRAMMAR_FAILED
from workers.wire.request import RequestOutput

logger = logging.getLogger(__name__)

# Sends the next text of a choice; returns an awaitable if the send is not complete.
Emit = Callable[[Choice, str], Awaitable[None] | None]
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a reverse proxy must not hold tokens back
]


class GenerationResponse(Response):
    """Answers one generation request. Errors before the first byte are raised, not sent."""

    def __init__(self, generation: Generation, backend: EngineBackend, recorder: Recorder) -> None:
        super().__init__()
        self._generation = generation
        self._backend = backend
        self._recorder = recorder
        self._record: RequestRecord | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the answer until it is complete or the client disconnects."""
        record = self._record = self._recorder.begin(self._generation, scope)
        answer = self._stream(scope, send) if self._generation.stream else self._collect(send)
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

    async def _collect(self, send: Send) -> None:
        texts = [choice.echo for choice in self._generation.choices]

        def emit(choice: Choice, text: str) -> None:
            texts[choice.index] += text

        await self._run_all(emit)
        if self._generation.has_details:  # logprobs of a long prompt take up to a second to write
            body = await asyncio.to_thread(full_body, self._generation, texts)
        else:
            body = full_body(self._generation, texts)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode("ascii")),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, scope: Scope, send: Send) -> None:
        generation = self._generation
        send_body = send
        writer = (
            DetailedEventWriter(generation) if generation.has_details else EventWriter(generation)
        )
        opened: set[int] = set()

        async def begin(choice: Choice, text: str) -> None:
            nonlocal send_body
            if not opened:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
                )
                send_body = scope.get(BODY_SEND, send)
            opened.add(choice.index)
            body = writer.text(choice, choice.echo + text)
            if generation.is_chat:
                body = writer.role(choice) + body
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
            await self._run_all(emit)
            last = writer.usage() + DONE if generation.include_usage else DONE
        except Exception as error:
            if not opened:
                raise
            if not isinstance(error, ServingError):
                logger.exception("stream %s broke", generation.response_id)
                error = ServingError("internal error; the server's log has the details")
            last = error_event(error) + DONE
        await send({"type": "http.response.body", "body": last})

    async def _run_all(self, emit: Emit) -> None:
        choices = self._generation.choices
        if len(choices) == 1:
            await self._run(choices[0], emit)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._run(choice, emit))
        except BaseExceptionGroup as errors:  # the error of one cancels all; raise the first
            raise errors.exceptions[0] from None

    async def _run(self, choice: Choice, emit: Emit) -> None:
        """Run one choice to its end; its text is sent by `emit`."""
        assert self._record is not None
        record = self._record.choice(choice)
        text, report = choice.text, choice.report
        outputs = self._backend.generate(
            choice.request_id, choice.prompt_token_ids, choice.params, **self._generation.routing
        )
        try:
            async for output in outputs:
                if output.finish_reason in ("error", "abort"):
                    raise _failure(self._generation, output)
                if not record.first_token_s:
                    choice.num_cached_tokens = output.num_cached_tokens
                if report is None:
                    piece = text.push(output)
                else:
                    num_before = text.num_tokens
                    piece = text.push(output)
                    report.add(output, text.num_tokens - num_before)
                sending = emit(choice, piece)
                if sending is not None:
                    await sending
                record.piece(output)
                if text.finish_reason is not None:
                    break
            else:
                raise EngineDeadError("the engine ended this request without an answer")
            record.reason = text.finish_reason
        except Exception as error:
            record.failed(error)
            raise
        finally:
            await outputs.aclose()  # aborts the request unless it is complete
            record.end()


def _failure(generation: Generation, output: RequestOutput) -> ServingError:
    """Return the error for a request that its rank ended."""
    message = output.error or "the engine ended this request"
    if generation.grammar_param is not None and message.startswith(GRAMMAR_FAILED):
        return BadRequestError(message, param=generation.grammar_param, code="invalid_grammar")
    return EngineDeadError(message)


async def _wait_for_disconnect(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
