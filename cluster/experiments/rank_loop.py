"""Requests on the engine of one rank: a closed loop, or arrivals at given times. Runs in the process of a rank.

All ranks vote in every step, so all see the same plan. When a plan runs nothing, the parent decides whether the ranks
wait for a further arrival or end: it alone has the arrivals of all ranks.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.bench.stream import Answer
from workers.engine.engine import Engine
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams


@dataclass(frozen=True)
class RankRequest:
    """One request of this rank. `due`: seconds from the start; None in a closed loop."""

    number: int
    prompt: list[int]
    max_tokens: int
    due: float | None


@dataclass(frozen=True)
class RankLoad:
    """The share of one rank. `in_flight` None: no limit. `begin`: perf_counter seconds of the common start."""

    requests: Sequence[RankRequest]
    in_flight: int | None
    begin: float
    salt: str
    temperature: float
    stop_token_ids: frozenset[int]


GoOn = Callable[[float | None], bool]
"""Called when nothing runs, with the perf_counter seconds of the next arrival; returns whether another step comes."""


class RankLoop:
    """Sends requests to an engine and times their outputs. `publish` is the engine's."""

    def __init__(self) -> None:
        self._engine: Engine
        self._answers: dict[str, Answer] = {}
        self._waiting: deque[tuple[RankRequest, float]] = deque()
        self._later: deque[RankRequest] = deque()
        self._load: RankLoad
        self._open = 0
        self._name = ""

    def publish(self, _ingress_id: str, outputs: list[RequestOutput]) -> None:
        """Record the outputs of a step."""
        now = time.perf_counter()
        for output in outputs:
            answer = self._answers[output.request_id]
            if output.token_ids:
                answer.chunk_times.append(now)
                answer.completion_tokens = (answer.completion_tokens or 0) + len(output.token_ids)
            if output.num_cached_tokens:
                answer.cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None:
                answer.ended = now
                answer.error = output.error
                self._open -= 1
                self._send_waiting(now)

    def run(self, engine: Engine, load: RankLoad, name: str, go_on: GoOn) -> dict[int, Answer]:
        """Run a load to its end; return the answers by number of the request. `name` is new in every call."""
        self._engine, self._load, self._name = engine, load, name
        self._answers, self._open = {}, 0
        open_loop = [request for request in load.requests if request.due is not None]
        self._later = deque(open_loop)
        closed = [request for request in load.requests if request.due is None]
        while (now := time.perf_counter()) < load.begin:
            time.sleep(load.begin - now)
        self._waiting = deque((request, load.begin) for request in closed)
        self._send_waiting(load.begin)
        while True:
            self._send_due()
            if not engine.step().run and not go_on(self._next_arrival()):
                break
        return {int(key.rpartition("/")[2]): answer for key, answer in self._answers.items()}

    def _next_arrival(self) -> float | None:
        """Return when this rank has work next: now if its last outputs sent requests, which async steps do."""
        if self._open:
            return time.perf_counter()
        return self._load.begin + (self._later[0].due or 0.0) if self._later else None

    def _send_due(self) -> None:
        now = time.perf_counter()
        while self._later and (due := self._load.begin + (self._later[0].due or 0.0)) <= now:
            self._waiting.append((self._later.popleft(), due))
        self._send_waiting(None)

    def _send_waiting(self, now: float | None) -> None:
        """Send the waiting requests that have a place. `now`: when a closed loop's place became free."""
        limit = self._load.in_flight
        while self._waiting and (limit is None or self._open < limit):
            request, due = self._waiting.popleft()
            self._send(request, due if request.due is not None or now is None else now)

    def _send(self, request: RankRequest, due: float) -> None:
        name = f"{self._name}/{request.number}"
        self._open += 1
        self._answers[name] = Answer(
            due, prompt_tokens=len(request.prompt), sent=time.perf_counter()
        )
        self._engine.submit(
            EngineRequest(
                request_id=name,
                ingress_id="experiment",
                prompt_token_ids=request.prompt,
                params=SamplingParams(
                    max_tokens=request.max_tokens,
                    temperature=self._load.temperature,
                    seed=request.number,
                    stop_token_ids=self._load.stop_token_ids,
                ),
                cache_salt=self._load.salt,
            )
        )
