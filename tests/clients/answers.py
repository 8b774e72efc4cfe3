"""What a server answers, from one body or put together from a stream: so that answers can be compared."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

LOGPROB_TOLERANCE = 2e-3


@dataclass
class Answer:
    """Of one choice: what counts, and logprobs, which rounding may change a little."""

    text: str = ""
    reasons: list[Any] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)

    def take(self, choice: dict[str, Any]) -> None:
        """A whole choice, or an item of a stream."""
        message = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or message.get("content") or ""
        for i, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            parts = self.calls.setdefault(call.get("index", i), [])
            parts += [function[name] for name in ("name", "arguments") if function.get(name)]
        if choice["finish_reason"] is not None:
            self.reasons += [choice["finish_reason"], choice["stop_reason"]]
        shown = choice["logprobs"] or {}
        for item in shown.get("content") or ():
            self.tokens.append(item["token"])
            self.logprobs.append(item["logprob"])
        self.tokens += shown.get("tokens") or ()
        self.logprobs += shown.get("token_logprobs") or ()

    def same_as(self, other: "Answer") -> None:
        """Fails where they differ."""
        assert (self.text, self.reasons) == (other.text, other.reasons)
        assert {i: "".join(parts) for i, parts in self.calls.items()} == {
            i: "".join(parts) for i, parts in other.calls.items()
        }
        assert self.tokens == other.tokens
        assert self.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)


@dataclass
class Asked:
    """One client: what it sends, and after how many items of its stream it leaves, if it does."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    leaves_after: int | None = None


async def ask(client: aiohttp.ClientSession, asked: Asked) -> list[Answer]:
    """The choices of the answer; nothing from a client that leaves."""
    answers: dict[int, Answer] = {}
    async with client.post(asked.path, json=asked.body, headers=asked.headers) as response:
        assert response.status == 200, await response.text()
        if not asked.body.get("stream"):
            items: AsyncIterator[Any] = _whole(response)
        else:
            items = _items(response)
        count = 0
        async for item in items:
            for choice in item["choices"]:
                answers.setdefault(choice["index"], Answer()).take(choice)
            count += 1
            if count == asked.leaves_after:
                response.close()
                return []
    return [answers[i] for i in sorted(answers)]


async def _whole(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    yield json.loads(await response.read())


async def _items(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    last = b""
    async for line in response.content:
        last = line.strip() or last
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
    assert last == b"data: [DONE]"
