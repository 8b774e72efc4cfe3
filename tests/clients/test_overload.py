"""A burst, and strangers: the guarded server answers whole or refuses at once, and serves only who has the key."""

import asyncio
import json

import httpx
import psutil

from tests.clients.conftest import KEY, MAX_RUNNING, MAX_WAITING, completion_body
from tests.serve.server import Server, title, variables

HEADERS = {"authorization": f"Bearer {KEY}"}


async def stream(client: httpx.AsyncClient) -> tuple[httpx.Response, list[str]]:
    body = completion_body("x", max_tokens=24, ignore_eos=True, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        return response, [line async for line in response.aiter_lines() if line]


def test_a_burst_is_answered_whole_or_refused_at_once(guarded: Server) -> None:
    async def burst() -> list[tuple[httpx.Response, list[str]]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=guarded.url, headers=HEADERS, timeout=60, limits=limits
        ) as client:
            return await asyncio.gather(*(stream(client) for _ in range(60)))

    answers = asyncio.run(burst())
    refused = [answer for answer in answers if answer[0].status_code == 429]
    served = [answer for answer in answers if answer[0].status_code == 200]
    assert len(served) >= MAX_RUNNING + MAX_WAITING and len(refused) >= 1
    assert len(served) + len(refused) == 60
    for response, lines in refused:
        assert int(response.headers["retry-after"]) >= 1
        assert json.loads(lines[0])["error"]["code"] == "overloaded"
    for _, lines in served:
        assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]
        assert not any('"error"' in line for line in lines)
    guarded.wait_free()


def test_without_the_key_nothing_and_nobody_learns_it(guarded: Server) -> None:
    body = completion_body("x", max_tokens=1)
    for headers in ({}, {"authorization": "Bearer wrong"}):
        for path in ("/v1/models", "/v1/completions", "/tokenize"):
            answer = guarded.post(path, json=body, headers=headers)
            assert answer.status_code == 401, path
    models = httpx.get(f"{guarded.url}/v1/models", headers=HEADERS, timeout=60)
    assert models.status_code == 200
    for path in ("/live", "/ready", "/health", "/version", "/load", "/metrics"):
        assert guarded.get(path).status_code == 200, path
    assert KEY not in guarded.log.read_text()
    for process in guarded.descendants():
        assert KEY not in variables(process) + title(process), process


def test_only_this_machine_is_listened_to(guarded: Server) -> None:
    """Other programs may have a port of the same number on the machine's other addresses."""
    port = int(guarded.url.rpartition(":")[2])
    sockets = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    owners = {c.pid for c in sockets if c.laddr == ("127.0.0.1", port)}
    assert len(owners) == 1
    found = {c.laddr.ip for c in sockets if c.laddr.port == port and c.pid in owners}
    assert found == {"127.0.0.1"}
