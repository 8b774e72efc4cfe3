"""The streams of scripts/chaos: requests of all kinds, their answers as a client sees them, and their pauses."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import httpx

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
    """A stream as a client sees it; `times` are those of its items. `broken`: its connection ended early."""

    texts: dict[int, str] = field(default_factory=dict)
    thoughts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    usage: dict[str, int] | None = None
    error: str = ""
    broken: bool = False
    times: list[float] = field(default_factory=list)

    def differs(self, other: "Answer") -> str:
        """Return the name of the first part that differs; "" if both are equal."""
        for name in ("error", "texts", "thoughts", "calls", "reasons", "usage"):
            if getattr(self, name) != getattr(other, name):
                return name
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        same = len(self.logprobs) == len(other.logprobs)
        close = all(abs(a - b) <= LOGPROB_TOLERANCE for a, b in pairs)
        return "" if same and close else "logprobs"

    def pause(self, at: float) -> float | None:
        """Return the seconds from `at` to the next item; None if the stream was not open then."""
        if not self.times or not self.times[0] <= at <= self.times[-1]:
            return None
        return next(time for time in self.times if time >= at) - at

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
        index, delta = choice["index"], choice.get("delta", {})
        text = choice.get("text") or delta.get("content") or ""
        self.texts[index] = self.texts.get(index, "") + text
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        self.thoughts[index] = self.thoughts.get(index, "") + thought
        for call in delta.get("tool_calls") or ():
            written = call["function"].get("name", "") + call["function"].get("arguments", "")
            self.calls[index] = self.calls.get(index, "") + written
        self.logprobs += ((choice.get("logprobs") or {}).get("token_logprobs")) or []
        if choice["finish_reason"]:
            self.reasons[index] = choice["finish_reason"]


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

    def __str__(self) -> str:
        was, now = (str(getattr(one, self.part))[:300] for one in (self.wanted, self.answer))
        return f"{self.kind} {self.number}: {self.part}: {was} -> {now}: {self.answer.error}"


@dataclass
class Found:
    """The results of the disturbed run. `different`: answers that chaos_judge has to judge."""

    done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    different: list[Difference] = field(default_factory=list)
    broken: int = 0  # connections that ended with their ingress; the request was sent again
    answers: list[Answer] = field(default_factory=list)

    def pause(self, at: float) -> float:
        """Return the time after `at` until every stream that was open has its next item."""
        found = [answer.pause(at) for answer in self.answers]
        return max((pause for pause in found if pause is not None), default=0.0)


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


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Run one request to its end."""
    answer = Answer()
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                answer.error = f"HTTP {response.status_code}: {(await response.aread())[:300]!r}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    answer.take(json.loads(line.removeprefix("data: ")))
                elif line == "data: [DONE]":
                    return answer
        answer.broken, answer.error = True, "the connection ended early"
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        answer.broken, answer.error = True, repr(error)
    except httpx.HTTPError as error:
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
    """Send the requests of these turns one after another until `ended` is set.

    may_break   a connection may end with its ingress; then the request is sent again and must be answered
    """
    for number in turns:
        kind, path, body = requests[number % len(requests)]
        answer = await stream(client, path, body)
        deadline = time.monotonic() + CONNECT_S
        while may_break and answer.broken and time.monotonic() < deadline:
            found.broken += bool(answer.times)
            await asyncio.sleep(0.2)
            answer = await stream(client, path, body)
        found.answers.append(answer)
        found.done[kind] += 1
        wanted = expected[number % len(requests)]
        if part := answer.differs(wanted):
            difference = Difference(kind, number % len(requests), part, wanted, answer)
            if part == "error":
                found.failed.append(str(difference))
            else:
                found.different.append(difference)
        if ended.is_set():
            return
