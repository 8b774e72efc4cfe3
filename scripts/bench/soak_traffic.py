"""The traffic of scripts/chaos --soak: requests of all kinds and lengths, and clients of which some leave early."""

import asyncio
import contextlib
import random
from collections.abc import Sequence

import httpx

from scripts.bench.chaos_streams import Answer, Found, Request, requests_of, send

PAUSE_S = 1.0
"""Time of a client between an answer and its next request, on average."""
LEAVING = 0.15
"""Share of the requests whose client leaves before the end."""
LEAVE_AFTER, LEAVE_AFTER_S = 60, 4.0
"""A leaving client leaves a stream after at most so many items, and an answer as a whole after so many seconds."""
LONG, SHARED = 30, 16
"""Sentences of a long prompt, and of a beginning that prompts share: about 600 and 320 tokens of the demo model."""
NUM_SHARED = 3


def mixed_requests(model: str, count: int) -> list[Request]:
    """Return the requests of `requests_of` in other forms.

    A quarter has a long prompt, a quarter begins like other ones, two fifths are answered as a whole, and half of the
    chats have log probabilities. Between 24 and 168 tokens are asked for.
    """
    return [_mixed(number, *request) for number, request in enumerate(requests_of(model, count))]


def _mixed(number: int, kind: str, path: str, asked: dict[str, object]) -> Request:
    body = asked | {"max_tokens": 24 + 24 * (number % 7)}
    if number % 5 in (1, 3):
        del body["stream"], body["stream_options"]
    if number % 4 == 2:
        body |= _after(body, _story(1000 + number, LONG))
    elif number % 4 == 3:
        body |= _after(body, _story(number % NUM_SHARED, SHARED))
    if kind == "chat":
        body |= {"min_tokens": 24, "logprobs": number % 2 == 0}
    return kind, path, body


def _after(body: dict[str, object], text: str) -> dict[str, object]:
    """Return the prompt of a request behind a text."""
    if "prompt" in body:
        return {"prompt": f"{text} {body['prompt']}"}
    messages = body["messages"]
    assert isinstance(messages, list)
    return {"messages": [{"role": "system", "content": text}, *messages]}


def _story(seed: int, sentences: int) -> str:
    rng = random.Random(seed)
    numbers = ((rng.randrange(40), rng.randrange(24), rng.randrange(60)) for _ in range(sentences))
    return " ".join(f"Ship {a} leaves at {b} with {c} boxes of tea." for a, b, c in numbers)


class Traffic:
    """Clients that send requests at random and enter the answers in `found`.

    hang_s      a longer time without an item is a failure
    may_break   see `send`
    left        answers whose client left
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        requests: Sequence[Request],
        expected: Sequence[Answer],
        found: Found,
        hang_s: float,
        *,
        may_break: bool,
    ):
        self._client, self._requests, self._expected = client, requests, expected
        self._found, self._hang_s, self._may_break = found, hang_s, may_break
        self._longest_wait_s = 0.0
        self.left = 0

    async def keep(self, seed: int, ended: asyncio.Event) -> None:
        """Be one client until `ended` is set."""
        rng = random.Random(seed)
        while not ended.is_set():
            number = rng.randrange(len(self._requests))
            if rng.random() >= LEAVING:
                await self._ask(number)
            elif self._requests[number][2].get("stream"):
                await self._ask(number, rng.randint(1, LEAVE_AFTER))
            else:
                await self._give_up(number, rng.uniform(0, LEAVE_AFTER_S))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), rng.expovariate(1 / PAUSE_S))

    async def _give_up(self, number: int, after_s: float) -> None:
        """Send a request whose client leaves before it has read anything."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await send(
                    self._client, self._requests[number], self._found, may_break=self._may_break
                )
        self.left += 1

    async def _ask(self, number: int, leave_after: int | None = None) -> None:
        request = self._requests[number]
        answer = await send(
            self._client, request, self._found, may_break=self._may_break, leave_after=leave_after
        )
        wait_s = answer.longest_wait()
        self._longest_wait_s = max(self._longest_wait_s, wait_s)
        self.left += answer.left
        self._found.enter(request[0], number, answer, self._expected[number])
        if wait_s > self._hang_s:
            self._found.failed.append(f"{request[0]} {number}: {wait_s:.1f} s without an item")

    def facts(self) -> dict[str, float]:
        """Return the totals, and the longest time without an item of the answers since the last call."""
        longest, self._longest_wait_s = self._longest_wait_s, 0.0
        found = self._found
        return {
            "in_flight": found.in_flight,
            "answers": found.done.total(),
            "failed": len(found.failed),
            "different": len(found.different),
            "left": self.left,
            "longest_wait_s": round(longest, 2),
        }
