"""Sends the requests of a round, in a closed or an open loop, and times the answers.

Closed loop: each of `concurrency` workers sends the next request when its last one is answered.
Open loop: requests arrive on a schedule whatever the server does, and latency counts from the
scheduled arrival, so the time in a queue of a slow server counts.
Knows nothing of tables, files and several servers.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from cluster.bench.arrivals import arrival_offsets
from cluster.bench.bodies import Target, request_body
from cluster.bench.http import Connection, Endpoint, HttpError
from cluster.bench.metrics import RoundResult, summarise
from cluster.bench.negotiate import negotiate
from cluster.bench.prompts import prompt_source
from cluster.bench.prompts_file import check_endpoint, read_prompts
from cluster.bench.settings import Load
from cluster.bench.stream import Answer, EventReader, shown
from cluster.bench.workload import PlannedRequest, plan_requests

# Timers tick in milliseconds: waking half a tick early makes a request early as often as late.
HALF_TICK_S = 0.0005
ARRIVALS = -1  # the number under which the random numbers of arrivals run


@dataclass
class Round:
    """The answers of one round. It is filled while the round runs, so an interrupted round has its answers too."""

    answers: list[Answer] = field(default_factory=list)
    client_cpu_s: float = 0.0


class Driver:
    """Sends one load to any number of servers. `headers` go with every request."""

    def __init__(
        self,
        load: Load,
        headers: dict[str, str],
        on_answer: Callable[[], None] = lambda: None,
    ):
        self._load = load
        self._headers = headers
        self._on_answer = on_answer
        self._records = []
        if load.prompts_file is not None:
            self._records = read_prompts(load.prompts_file)
            check_endpoint(load.prompts_file, self._records, load.endpoint)

    async def prepare(self, urls: dict[str, str], model: str | None) -> list[Target]:
        """Query each server (name -> URL) for its model and the accepted form of requests."""
        return await negotiate(self._load, self._headers, urls, model)

    async def run_round(self, target: Target, index: int, requests: int) -> RoundResult:
        """Run one round of `requests` requests and return its figures."""
        finished = Round()
        await self.play(target, index, requests, finished)
        return summarise(finished.answers, finished.client_cpu_s, self._load.goodput)

    async def play(self, target: Target, index: int, requests: int, into: Round) -> None:
        """Run one round. All bodies are built before the clock starts."""
        load = self._load
        planned = plan_requests(load, self._records, target.text_length, index, requests)
        offsets = None
        if load.request_rate is not None:
            source = prompt_source(load.seed, index, ARRIVALS)
            offsets = arrival_offsets(requests, load.request_rate, load.burstiness, source)
        await self.send(target, planned, offsets, into)

    async def send(
        self,
        target: Target,
        planned: Sequence[PlannedRequest],
        offsets: Sequence[float] | None,
        into: Round,
    ) -> None:
        """Send these requests at these seconds from the start; `offsets` None: in the closed loop of the load."""
        load = self._load
        bodies = [request_body(load, target, request) for request in planned]
        sender = _Sender(load, target, self._headers, into.answers, self._on_answer)
        cpu = time.process_time()
        try:
            if offsets is None:
                await sender.closed(bodies)
            else:
                await sender.open(bodies, offsets)
        finally:
            sender.close()
            into.client_cpu_s = time.process_time() - cpu


class _Sender:
    """One round's connections and answers."""

    def __init__(
        self,
        load: Load,
        target: Target,
        headers: dict[str, str],
        answers: list[Answer],
        on_answer: Callable[[], None],
    ):
        self._load = load
        self._endpoint = Endpoint.parse(target.url)
        self._headers = headers
        self._answers = answers
        self._on_answer = on_answer
        self._idle: list[Connection] = []

    def close(self) -> None:
        """Drop the connections."""
        for connection in self._idle:
            connection.close()

    async def closed(self, bodies: list[bytes]) -> None:
        """Keep `concurrency` requests in flight until all are answered."""
        queue = iter(bodies)

        async def work() -> None:
            for body in queue:
                await self._send(body, time.perf_counter())

        assert self._load.concurrency is not None
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._load.concurrency, len(bodies))):
                group.create_task(work())

    async def open(self, bodies: list[bytes], offsets: Iterable[float]) -> None:
        """Send each request at its time. If the requests in flight are limited, the wait counts as latency."""
        limit = self._load.concurrency
        places = nullcontext() if limit is None else asyncio.Semaphore(limit)
        start = time.perf_counter()

        async def send(body: bytes, due: float) -> None:
            async with places:
                await self._send(body, due)

        async with asyncio.TaskGroup() as group:
            for body, offset in zip(bodies, offsets, strict=True):
                due = start + offset
                while (wait := due - HALF_TICK_S - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(send(body, due))

    async def _send(self, body: bytes, due: float) -> None:
        connection = self._idle.pop() if self._idle else Connection(self._endpoint, self._headers)
        sent = time.perf_counter()
        answer = Answer(min(due, sent), sent=sent)
        self._answers.append(answer)
        try:
            response = await connection.request(
                "POST",
                self._load.path,
                body,
                timeout_s=self._load.timeout_s,
                sink=EventReader(answer, self._load.stream_format).feed,
            )
            if response.status != 200:
                answer.error, answer.refusal = f"HTTP {response.status}", shown(response.body)
        except HttpError as error:
            answer.error = str(error)
        except TimeoutError:
            answer.error = "timeout"
        answer.ended = time.perf_counter()
        if answer.error is None and not answer.chunk_times and not answer.completion_tokens:
            answer.error = "no output"
        self._idle.append(connection)
        self._on_answer()
