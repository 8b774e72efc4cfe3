"""Runs a batch: the requests of a file, many at once, with a line in the output for each."""

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from cluster.api.backend import EngineBackend
from cluster.bench.progress import Progress
from cluster.errors import EngineDeadError, ServingError
from cluster.offline.batch_input import BatchError, BatchInput, Line
from cluster.offline.batch_output import BatchOutput, error_fields, response_fields
from cluster.offline.dispatcher import Dispatcher
from cluster.offline.pool import run_pool

POLL_S = 0.1
ATTEMPTS = 3  # of a request that its rank ended; each waits for ranks that are rebuilt
REPORT_S = 30.0  # between two lines of progress where there is no terminal


@dataclass(frozen=True, slots=True)
class Response:
    """The response to one request; `body` is JSON."""

    status: int
    request_id: str
    body: bytes
    output_tokens: int = 0
    prompt_tokens: int = 0


class Server(Protocol):
    """Answers the requests of a batch."""

    async def answer(self, line: Line) -> Response:
        """Return the response, which may have an error status. Raises BatchError when no request can be answered."""
        ...


class LocalServer:
    """The ranks of this process."""

    def __init__(self, dispatcher: Dispatcher, backend: EngineBackend) -> None:
        self._dispatcher = dispatcher
        self._backend = backend

    async def answer(self, line: Line) -> Response:
        """See Server."""
        request_id = uuid.uuid4().hex
        for _ in range(ATTEMPTS):
            try:
                done = await self._dispatcher.answer(line.url, line.body)
            except ServingError as error:
                failure = error
            else:
                return Response(200, request_id, *done)
            if not isinstance(failure, EngineDeadError):
                break
            healthy, reason = self._backend.health()
            if not healthy:
                raise BatchError(reason) from failure
        return Response(failure.status, request_id, self._dispatcher.error_body(line.url, failure))


class BatchRun:
    """One run over the lines that have no result yet."""

    def __init__(self, lines: BatchInput, output: BatchOutput, progress: Progress) -> None:
        self._input, self._output = lines, output
        self._progress = progress
        self._total = lines.count(output.done)
        self._output_tokens = self._prompt_tokens = 0
        self._started = 0.0

    @property
    def summary(self) -> str:
        """The state in words, such as `8 of 10 lines have a result, 1 with an error; 900 output tok/s`."""
        done = f"{len(self._output.done):,} of {self._total:,} lines have a result"
        return f"{done}, {self.num_errors:,} with an error; {self.speed}"

    @property
    def speed(self) -> str:
        """Output tokens per second of this run; tokens of prompts where answers have no tokens."""
        seconds = time.monotonic() - self._started if self._started else 0.0
        tokens, kind = self._output_tokens, "output"
        if not tokens and self._prompt_tokens:
            tokens, kind = self._prompt_tokens, "prompt"
        return f"{tokens / max(seconds, 0.001):,.0f} {kind} tok/s"

    @property
    def num_errors(self) -> int:
        """Lines with an error for a result, also those of earlier runs."""
        return self._output.num_errors

    @property
    def complete(self) -> bool:
        """Whether each line has a result."""
        return len(self._output.done) >= self._total

    async def run(self, server: Server, concurrency: int, stopped: Callable[[], bool]) -> None:
        """Answer the lines, at most `concurrency` at once, until all have a result or `stopped`.

        Requests that have not ended are given up then. Raises BatchError.
        """

        async def work(line: Line) -> None:
            await self._answer(line, server)

        remaining = (line for line in self._input.lines() if line.number not in self._output.done)
        self._started = reported = time.monotonic()
        with self._bar():
            pool = asyncio.ensure_future(run_pool(remaining, work, concurrency))
            try:
                while not pool.done() and not stopped():
                    await asyncio.wait((pool,), timeout=POLL_S)
                    if not self._progress.draws and time.monotonic() - reported > REPORT_S:
                        reported = time.monotonic()
                        print(self.summary, file=sys.stderr)
            finally:
                pool.cancel()
                await asyncio.wait((pool,))
            if not pool.cancelled():
                pool.result()  # raises its error
            self._output.sync()

    async def _answer(self, line: Line, server: Server) -> None:
        if line.error is not None:
            self._output.append(line, error_fields(*line.error), is_error=True)
        else:
            found = await server.answer(line)
            self._output_tokens += found.output_tokens
            self._prompt_tokens += found.prompt_tokens
            fields = response_fields(found.status, found.request_id, found.body)
            self._output.append(line, fields, is_error=found.status != 200)
        self._progress.advance()

    @contextmanager
    def _bar(self) -> Iterator[None]:
        def note() -> str:
            errors = self.num_errors
            return f"{self.speed}, {errors:,} errors" if errors else self.speed

        done = len(self._output.done)
        with self._progress.stage("lines", self._total, done=done, note=note):
            yield
