"""Random bodies with every feature: what is streamed adds up to what is answered whole."""

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.clients.answers import Asked, ask
from tests.clients.random_bodies import PATHS, Generator

AT_ONCE = 8
STOPS = (["e"], ["the", "a "], ['"', "\n"])


def reproducible(body: dict[str, Any], i: int) -> dict[str, Any]:
    """The body with a seed, a few more tokens, and nothing that streams do not have."""
    for name in ("prompt_logprobs", "max_completion_tokens", "stream", "stream_options"):
        body.pop(name, None)
    body |= {"seed": i, "max_tokens": (3, 8, 20)[i % 3]}
    if i % 2:
        body["stop"] = STOPS[i % len(STOPS)]
    return body


@pytest.mark.parametrize("number", [30, pytest.param(120, marks=pytest.mark.exhaustive)])
def test_random_answers_streamed_and_whole(server, number):
    generator = Generator(seed=7)
    bodies = enumerate(reproducible(generator.sensible(PATHS[i % 2]), i) for i in range(number))
    statuses: list[int] = []

    async def work(client: aiohttp.ClientSession) -> None:
        for i, body in bodies:
            path = PATHS[i % 2]
            async with client.post(path, json=body) as response:
                statuses.append(response.status)
            if response.status != 200:
                async with client.post(path, json=body | {"stream": True}) as streamed:
                    assert streamed.status == response.status, body
                continue
            whole = await ask(client, Asked(path, body))
            parts = await ask(client, Asked(path, body | {"stream": True}))
            assert len(whole) == len(parts) > 0
            for answer, part in zip(whole, parts, strict=True):
                part.same_as(answer)

    async def main() -> None:
        async with aiohttp.ClientSession(server.url) as client:
            await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))

    asyncio.run(main())
    assert len(statuses) == number and statuses.count(200) > number / 2
