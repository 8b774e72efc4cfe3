"""2,000 random bodies over the real server: an answer to each in time, never a 5xx, and nothing left behind."""

import asyncio
import collections
import json

import aiohttp
import httpx

from tests.clients.conftest import HELLO, HELLO_ANSWER, chat_body
from tests.clients.random_bodies import Body, Generator

NUMBER = 2000
AT_ONCE = 48
LIMIT_S = 30.0
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
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert len(content) < 10_000, "an error that repeats what was sent"
        return
    if content.startswith(b"data: "):
        *items, end = content.decode().split("\n\n")[:-1]
        assert end == "data: [DONE]"
        for item in items:
            assert "error" not in json.loads(item.removeprefix("data: "))
    elif body.path.startswith("/v1/"):
        answer = json.loads(content)
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert all(choice["finish_reason"] for choice in answer["choices"])


def test_2000_random_bodies(server, chat):
    generator = Generator(seed=2026)
    bodies = enumerate(generator.body() for _ in range(NUMBER))
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
    assert sum(seen.values()) == NUMBER
    # Enough of them reach the engine, and enough do not.
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert seen[path, 200] > NUMBER / 10 and seen[path, 400] > NUMBER / 10, seen
    server.wait_free()
    content = chat(HELLO).choices[0].message.content
    assert content.startswith(HELLO_ANSWER)
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/ready").status_code == 200
        assert client.get("/load").json() == {"server_load": 0}
        assert client.post("/v1/chat/completions", json=chat_body(n=2)).status_code == 200
