"""The event loop of an ingress goes on while any accepted body is parsed, checked, rendered and tokenised."""

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.unit.api_fakes import Api, FakeBackend

# The rule is 50 ms; the margin is for a slow machine.
LIMIT_S = 0.05
MARGIN = 2
CONTEXT = 1_000_000
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def ticker() -> AsyncIterator[list[float]]:
    """The seconds between two turns of the loop.

    Of wall time and processor time of this process the smaller one: a thread that holds the interpreter lock spends
    both, and a machine that is busy with other programs only the first.
    """
    gaps: list[float] = []
    gc.freeze()  # as the ingress: a search through all that tests before have imported would be a gap

    last, used = time.perf_counter(), time.process_time()  # work may come before the first turn

    async def tick(last: float, used: float) -> None:
        while True:
            await asyncio.sleep(0.001)
            now, now_used = time.perf_counter(), time.process_time()
            gaps.append(min(now - last, now_used - used))
            last, used = now, now_used

    task = asyncio.create_task(tick(last, used))
    try:
        yield gaps
    finally:
        task.cancel()


def message(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "x", **fields}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def with_arguments(arguments: str) -> bytes:
    turn = message(role="assistant", content="", tool_calls=[call(arguments)])
    body = {"messages": [message(), turn, message()], "max_tokens": 1}
    return json.dumps({**body, "truncate_prompt_tokens": 900_000}).encode()


def listed(part: bytes, number: int, field: bytes = b"messages") -> bytes:
    head = b'{"max_tokens":1,"truncate_prompt_tokens":900000,"' + field
    return head + b'":[' + b",".join([part] * number) + b"]}"


EMPTY = b'{"role":"user","content":""}'
ITEM = b'{"role":"user","content":"x"}'
ACCEPTED = {
    "arguments-3.8MB": (CHAT, with_arguments(json.dumps({"a": "x y z " * 633_000}))),
    "arguments-of-lists": (CHAT, with_arguments("[" + ",".join(["[1]"] * 900_000) + "]")),
    "arguments-0.2MB": (CHAT, with_arguments(json.dumps({"a": "some words " * 18_000}))),
    "empty-messages": (CHAT, listed(EMPTY, 135_000)),
    "empty-messages-below-a-process": (CHAT, listed(EMPTY, 2_200)),
    "documents": (
        CHAT,
        b'{"documents":[' + b",".join([b"{}"] * 1_000_000) + b"]," + listed(EMPTY, 1)[1:],
    ),
    "unknown-field": (
        CHAT,
        b'{"junk":[' + b",".join([b"[1]"] * 1_000_000) + b"]," + listed(EMPTY, 1)[1:],
    ),
    "token-ids": ("/v1/completions", listed(b"7", 1_900_000, b"prompt")),
    "prompts": ("/v1/completions", listed(b'"' + b"xy " * 1300 + b'"', 1_000, b"prompt")),
    "tokenize": ("/tokenize", b'{"prompt":"' + b"xy " * 1_300_000 + b'"}'),
    "blocks": ("/v1/messages", listed(ITEM, 130_000)),
    "items": (
        "/v1/responses",
        listed(ITEM, 130_000, b"input")
        .replace(b'"max_tokens"', b'"max_output_tokens"')
        .replace(b'"truncate_prompt_tokens":900000', b'"truncation":"auto"'),
    ),
}
REFUSED = {
    "lists": (CHAT, listed(b"[1]", 1_000_000)),
    "no-json": (CHAT, b"[" * 4_000_000),
    "too-long": (
        "/v1/completions",
        listed(b"7", 1_900_000, b"prompt").replace(b":1,", b":9999999,"),
    ),
}

ALWAYS = ("arguments-0.2MB", "empty-messages", "lists")


def answered(path: str, body: bytes) -> tuple[int, float]:
    """The status of the answer, and the longest gap of the loop until it came."""
    backend = FakeBackend(max_model_len=CONTEXT, max_request_tokens=CONTEXT)
    api = Api(backend, max_body_bytes=4 * 2**20)

    async def scenario() -> tuple[int, float]:
        headers = {"content-type": "application/json"}
        async with api.client() as client:
            client.timeout = 120
            # The first body of its kind starts the process of large bodies.
            warm = json.dumps({"messages": [message(content="x" * 200_000)], "max_tokens": 1})
            assert (await client.post(CHAT, content=warm, headers=headers)).status_code == 200
            async with ticker() as gaps:
                answer = await client.post(path, content=body, headers=headers)
                await asyncio.sleep(0.005)
            return answer.status_code, max(gaps)

    return asyncio.run(scenario())


def kinds(bodies: dict[str, tuple[str, bytes]]) -> list[Any]:
    """The bodies; most of them take a minute together."""
    return [
        kind if kind in ALWAYS else pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in bodies
    ]


@pytest.mark.parametrize("kind", kinds(ACCEPTED))
def test_the_loop_goes_on_during_any_accepted_body(kind):
    status, gap = answered(*ACCEPTED[kind])
    assert status == 200
    assert gap < LIMIT_S * MARGIN, f"the loop stopped for {gap * 1000:.0f} ms"


@pytest.mark.parametrize("kind", kinds(REFUSED))
def test_the_loop_goes_on_during_bodies_that_are_refused(kind):
    status, gap = answered(*REFUSED[kind])
    assert status == 400
    assert gap < LIMIT_S * MARGIN, f"the loop stopped for {gap * 1000:.0f} ms"
