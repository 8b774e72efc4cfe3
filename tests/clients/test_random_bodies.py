"""Random bodies over the real server: an answer to each in time, never a 5xx, and nothing left behind."""

import asyncio
import collections
import json
from typing import Any

import aiohttp
import pytest

from tests.clients.conftest import HELLO, HELLO_ANSWER, chat_body
from tests.clients.random_bodies import COUNT_TOKENS, MESSAGES, RESPONSES, Body, Generator

AT_ONCE = 48
LIMIT_S = 120.0
GOOD = {200, 400, 404}


async def _send(client: aiohttp.ClientSession, body: Body) -> tuple[int, bytes]:
    headers = {"content-type": "application/json"}
    async with (
        asyncio.timeout(LIMIT_S),
        client.post(body.path, data=body.content, headers=headers) as answer,
    ):
        return answer.status, await answer.read()


def _check(body: Body, status: int, content: bytes) -> None:
    assert status in GOOD, content[:500]
    if status != 200:
        _check_error(body, json.loads(content))
        assert len(content) < 10_000, "an error that repeats what was sent"
    elif content.startswith((b"data: ", b"event: ")):
        _check_stream(body, content.decode().split("\n\n")[:-1])
    elif body.path.startswith("/v1/"):
        _check_whole(body, json.loads(content))


def _check_error(body: Body, answer: dict[str, Any]) -> None:
    error = answer["error"]
    if body.path in (MESSAGES, COUNT_TOKENS):
        assert set(answer) == {"type", "error", "request_id"}
        assert set(error) - {"details"} == {"type", "message"} and error["message"]
    else:
        assert set(error) == {"message", "type", "param", "code"} and error["message"]


def _check_stream(body: Body, items: list[str]) -> None:
    if body.path in (MESSAGES, RESPONSES):
        kinds = [item.split("\n")[0].removeprefix("event: ") for item in items]
        assert kinds[-1] in ("message_stop", "response.completed", "response.incomplete"), kinds
        assert "error" not in kinds
        return
    *items, end = items
    assert end == "data: [DONE]"
    for item in items:
        assert "error" not in json.loads(item.removeprefix("data: "))


def _check_whole(body: Body, answer: dict[str, Any]) -> None:
    usage = answer.get("usage") or {}
    if body.path == COUNT_TOKENS:
        assert answer["input_tokens"] > 0
    elif body.path == MESSAGES:
        assert answer["stop_reason"] and answer["content"] and usage["output_tokens"] > 0
    elif body.path == RESPONSES:
        kinds = ("queued", "in_progress") if answer["background"] else ("completed", "incomplete")
        assert answer["status"] in kinds and answer["error"] is None
    else:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert all(choice["finish_reason"] for choice in answer["choices"])


@pytest.mark.parametrize("number", [300, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_random_bodies(server, chat, number):
    generator = Generator(seed=2026)
    bodies = enumerate(generator.body() for _ in range(number))
    seen: collections.Counter[tuple[str, int]] = collections.Counter()
    wrong: list[str] = []

    async def work(client: aiohttp.ClientSession) -> None:
        for i, body in bodies:
            status = 0
            try:
                status, content = await _send(client, body)
                _check(body, status, content)
            except (
                AssertionError,
                TimeoutError,
                aiohttp.ClientError,
                ValueError,
                KeyError,
            ) as error:
                wrong.append(f"{i}: {body.path} {body.content[:1000]!r}: {error!r}")
            seen[body.path, status] += 1

    async def main() -> None:
        async with aiohttp.ClientSession(server.url) as client:
            await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))

    asyncio.run(main())
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])
    assert sum(seen.values()) == number
    # Enough of them reach the engine, and enough do not.
    for path in ("/v1/completions", "/v1/chat/completions", RESPONSES, MESSAGES):
        assert seen[path, 200] > number / 20 and seen[path, 400] > number / 20, seen
    server.wait_free()
    content = chat(HELLO).choices[0].message.content
    assert content.startswith(HELLO_ANSWER)
    assert server.get("/ready").status_code == 200
    assert server.post("/v1/chat/completions", json=chat_body(n=2)).status_code == 200
