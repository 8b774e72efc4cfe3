"""The streams of scripts/chaos: requests of all kinds, their answers as a client sees them, and their pauses."""

import asyncio
import json
import random
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any

import httpx

MODEL = "demo"
ROUNDS = 5
"""Undisturbed answers of each request: of 216 requests, three had two answers in five rounds."""
LOGPROB_TOLERANCE = 1e-3
"""A token that is computed again in a prompt has another order of additions."""
CONNECT_S = 30.0
"""Time in which a client that cannot connect tries again: an ingress may be starting anew."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
Request = tuple[str, str, dict[str, Any]]  # kind, path, body


@dataclass
class Answer:
    """A stream as a client sees it, or an answer that came as a whole.

    broken   its connection ended early
    left     its client left before the end
    sent     when the request was sent
    times    when the items came
    """

    texts: dict[int, str] = field(default_factory=dict)
    thoughts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    usage: dict[str, int] | None = None
    error: str = ""
    broken: bool = False
    left: bool = False
    sent: float = 0.0
    times: list[float] = field(default_factory=list)

    def differs(self, other: "Answer") -> str:
        """Return the name of the first part that differs, or "". An answer that was left is a beginning."""
        if self.left or other.left:
            return _unlike(*((self, other) if self.left else (other, self)))
        for name in ("error", "texts", "thoughts", "calls", "reasons", "usage"):
            if getattr(self, name) != getattr(other, name):
                return name
        same = len(self.logprobs) == len(other.logprobs)
        return "" if same and _close(self.logprobs, other.logprobs) else "logprobs"

    def longest_wait(self) -> float:
        """Return the longest time without an item, from the moment the request was sent."""
        moments = [self.sent, *self.times]
        return max((later - earlier for earlier, later in pairwise(moments)), default=0.0)

    def take(self, item: dict[str, Any]) -> None:
        """Enter one item of the stream."""
        self.times.append(time.monotonic())
        if "error" in item:
            self.error = json.dumps(item["error"])
        if usage := item.get("usage"):
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
            details = usage.get("completion_tokens_details") or {}
            self.usage["reasoning_tokens"] = details.get("reasoning_tokens", 0)
        for choice in item.get("choices", ()):
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index, delta = choice["index"], choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or delta.get("content") or ""
        self.texts[index] = self.texts.get(index, "") + text
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        self.thoughts[index] = self.thoughts.get(index, "") + thought
        for call in delta.get("tool_calls") or ():
            written = call["function"].get("name", "") + call["function"].get("arguments", "")
            self.calls[index] = self.calls.get(index, "") + written
        found = choice.get("logprobs") or {}
        self.logprobs += found.get("token_logprobs") or []
        self.logprobs += [token["logprob"] for token in found.get("content") or ()]
        if choice["finish_reason"]:
            self.reasons[index] = choice["finish_reason"]


def _unlike(beginning: Answer, whole: Answer) -> str:
    """Return the name of the first part of `beginning` with which that of `whole` does not begin."""
    if beginning.error or whole.error:
        return "error"
    for name in ("texts", "thoughts", "calls"):
        parts, wholes = getattr(beginning, name), getattr(whole, name)
        if not all(wholes.get(index, "").startswith(text) for index, text in parts.items()):
            return name
    return "" if _close(beginning.logprobs, whole.logprobs) else "logprobs"


def _close(some: list[float], others: list[float]) -> bool:
    pairs = zip(some, others, strict=False)
    return all(abs(a - b) <= LOGPROB_TOLERANCE for a, b in pairs)


@dataclass(frozen=True)
class Difference:
    """An answer without an error that differs in `part` from that of the undisturbed run.

    number   of its request
    """

    kind: str
    number: int
    part: str
    wanted: Answer
    answer: Answer

    def covers(self, other: "Difference") -> bool:
        """Whether the other difference has this answer, or its beginning, to this request."""
        same = self.number == other.number and not self.answer.left
        return same and not self.answer.differs(other.answer)

    def __str__(self) -> str:
        was, now = (str(getattr(one, self.part))[:300] for one in (self.wanted, self.answer))
        return f"{self.kind} {self.number}: {self.part}: {was} -> {now}: {self.answer.error}"


@dataclass
class Found:
    """The results of the disturbed run.

    different   answers that chaos_judge has to judge
    broken      connections that ended with their ingress; the request was sent again
    in_flight   requests that are not answered yet
    times       when the items of each answer came; an hour has too many answers to keep their texts
    """

    done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    different: list[Difference] = field(default_factory=list)
    broken: int = 0
    in_flight: int = 0
    times: "list[array[float]]" = field(default_factory=list)

    def enter(self, kind: str, number: int, answer: Answer, wanted: Answer) -> None:
        """Compare the answer to request `number` with that of the undisturbed server."""
        self.times.append(array("d", answer.times))
        self.done[kind] += 1
        if part := answer.differs(wanted):
            difference = Difference(kind, number, part, wanted, answer)
            if part == "error":
                self.failed.append(str(difference))
            else:
                self.different.append(difference)

    def pause(self, at: float) -> float:
        """Return the time after `at` until every stream that was open has its next item."""
        opened = (times for times in self.times if times and times[0] <= at <= times[-1])
        return max((times[bisect_left(times, at)] - at for times in opened), default=0.0)


def requests_of(model: str, count: int) -> list[Request]:
    """Return `count` requests of all kinds."""
    found = []
    for number in range(count):
        words = f"Number {number}: tell me about ship {number * 7 % 31}."
        common = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        common |= {"max_tokens": 120 + 40 * (number % 4), "seed": number}
        chat = common | {"messages": [{"role": "user", "content": words}]}
        plain = common | {"prompt": words, "ignore_eos": True}
        schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("greedy", plain | {"temperature": 0}),
            ("seeded", plain | {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5}),
            ("logprobs", plain | {"temperature": 0, "logprobs": 2}),
            ("n = 2", plain | {"temperature": 0.8, "n": 2}),
            ("JSON schema", chat | {"temperature": 0.7, "response_format": schema}),
            ("tools", chat | {"temperature": 0.7, "tools": [WEATHER], "tool_choice": "required"}),
            ("chat", chat | {"temperature": 0.7, "ignore_eos": True, "min_tokens": 60}),
            ("stop", plain | {"temperature": 0.9, "stop": ["qz", "Zx", "jj", "and"]}),
            ("reasoning", thinking(chat | {"temperature": 0.9})),
        ]
        kind, body = kinds[number % len(kinds)]
        route = "chat/completions" if "messages" in body else "completions"
        found.append((kind, f"/v1/{route}", body))
    return found


def thinking(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a request with a grammar of thoughts, which the demo model would not write by itself."""
    grammar = 'start: "<think>" /[a-z ]{40,90}/ "</think>" /[A-Z][a-z ]{30,60}/'
    return chat | {"structured_outputs": {"grammar": grammar}}


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], leave_after: int | None = None
) -> Answer:
    """Run one request to its end, or leave after so many items."""
    answer = Answer(sent=time.monotonic())
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                answer.error = f"HTTP {response.status_code}: {(await response.aread())[:300]!r}"
                return answer
            if not body.get("stream"):
                answer.take(json.loads(await response.aread()))
                return answer
            async for line in response.aiter_lines():
                if len(answer.times) == leave_after:
                    answer.left = True
                    return answer
                if line.startswith("data: {"):
                    answer.take(json.loads(line.removeprefix("data: ")))
                elif line == "data: [DONE]":
                    return answer
        answer.broken, answer.error = True, "the connection ended early"
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        answer.broken, answer.error = True, repr(error)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = repr(error)
    return answer


async def reference(
    client: httpx.AsyncClient, requests: list[Request], at_once: int = 16
) -> tuple[list[Request], list[Answer]]:
    """Answer all requests ROUNDS times, undisturbed; return those with one answer, and their answers.

    Each round has an order of its own, because a request in another batch has other rounding errors: a router of
    experts may choose another expert for them. Each round computes the prompts again (`cache_salt`): a cached prompt
    would have the rounding of the first round in all rounds.
    """
    gate = asyncio.Semaphore(at_once)

    async def once(path: str, body: dict[str, Any], salt: str) -> Answer:
        async with gate:
            return await stream(client, path, body | {"cache_salt": salt})

    rounds = []
    for number in range(ROUNDS):
        order = random.Random(number).sample(range(len(requests)), len(requests))
        answers = await asyncio.gather(*(once(*requests[i][1:], str(number)) for i in order))
        rounds.append(
            [answer for _, answer in sorted(zip(order, answers, strict=True), key=itemgetter(0))]
        )
    errors = [answer.error for answers in rounds for answer in answers if answer.error]
    assert not errors, f"the undisturbed run has errors: {errors[0]}"
    expected = rounds[0]
    kept = [
        i
        for i, answer in enumerate(expected)
        if not any(answer.differs(answers[i]) for answers in rounds[1:])
    ]
    return [requests[i] for i in kept], [expected[i] for i in kept]


async def send(
    client: httpx.AsyncClient,
    request: Request,
    found: Found,
    *,
    may_break: bool,
    leave_after: int | None = None,
) -> Answer:
    """Return the answer to a request.

    may_break     a connection may end with its ingress; then the request is sent again and must be answered
    leave_after   so many items, if not at the end
    """
    _, path, body = request
    deadline = None
    found.in_flight += 1
    try:
        while True:
            answer = await stream(client, path, body, leave_after)
            deadline = deadline or time.monotonic() + CONNECT_S
            if not (may_break and answer.broken and time.monotonic() < deadline):
                return answer
            found.broken += bool(answer.times)
            await asyncio.sleep(0.2)
    finally:
        found.in_flight -= 1


async def repeat(
    client: httpx.AsyncClient,
    requests: list[Request],
    expected: list[Answer],
    found: Found,
    turns: Iterable[int],
    ended: asyncio.Event,
    *,
    may_break: bool,
) -> None:
    """Send the requests of these turns one after another until `ended` is set; see `send`."""
    for turn in turns:
        number = turn % len(requests)
        answer = await send(client, requests[number], found, may_break=may_break)
        found.enter(requests[number][0], number, answer, expected[number])
        if ended.is_set():
            return
