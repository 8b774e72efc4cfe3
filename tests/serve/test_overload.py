"""Too many, too long, gone or uninvited: the server stays free for the others, and every block comes back."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.serve.open_streams import Stream, check_stop_ends
from tests.serve.server import Server, running

KEY = "the-right-key-7d1c"
HEADERS = {"authorization": f"Bearer {KEY}"}
TIMEOUT_S = 2.5
LONG = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory, checkpoint) -> Iterator[Server]:
    """8 sequences run at once and 4 may wait; requests may take 2.5 s; a key is needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_API_KEY", KEY)
        with running(
            tmp_path_factory.mktemp("overload"),
            checkpoint,
            model={"max_model_len": 4096},
            scheduler={"max_num_seqs": 4},
            cache={"num_blocks": 2048},
            serve={"max_queued_requests": 4, "limits": {"request_timeout_s": TIMEOUT_S}},
        ) as server:
            yield server


async def stream(client: httpx.AsyncClient, **fields) -> tuple[httpx.Response, list[str]]:
    body = {**LONG, "stream": True, **fields}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        return response, [line async for line in response.aiter_lines() if line]


def client_of(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=60, limits=limits)


def test_a_burst_is_answered_whole_or_refused_at_once(server):
    async def burst():
        async with client_of(server) as client:
            return await asyncio.gather(*(stream(client, max_tokens=48) for _ in range(60)))

    answers = asyncio.run(burst())
    refused = [answer for answer in answers if answer[0].status_code == 429]
    served = [answer for answer in answers if answer[0].status_code == 200]
    assert len(served) >= 12 and len(refused) >= 1 and len(served) + len(refused) == 60
    for response, lines in refused:
        assert int(response.headers["retry-after"]) >= 1
        assert json.loads(lines[0])["error"]["code"] == "overloaded"
    for _, lines in served:
        assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]
        assert not any('"error"' in line for line in lines)
    server.wait_free()


def test_choices_count_one_by_one(server):
    body = {**LONG, "max_tokens": 1, "n": 13}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=HEADERS)
    assert answer.status_code == 400 and "12" in answer.json()["error"]["message"]
    answer = httpx.post(f"{server.url}/v1/completions", json={**body, "n": 12}, headers=HEADERS)
    assert len(answer.json()["choices"]) == 12


@pytest.mark.parametrize("kind", ["stream", "whole", "many"])
def test_who_leaves_frees_everything_within_a_second(server, kind):
    body = {**LONG, "stream": kind == "stream", "n": 10 if kind == "many" else 1}
    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + content)
        deadline = time.monotonic() + 2
        expected = 2 if kind == "many" else 0  # of ten choices two wait: eight can run
        while not (now := server.gauges())["num_requests_running"]:
            assert time.monotonic() < deadline, now
        assert now["kv_cache_usage_perc"] > 0
        assert server.gauges()["num_requests_waiting"] == expected
    server.wait_free()


@pytest.mark.parametrize("is_stream", [True, False])
def test_too_late_is_told_and_freed(server, is_stream):
    async def ask():
        async with client_of(server) as client:
            started = time.monotonic()
            response, lines = await stream(client, stream=is_stream)
            return response, lines, time.monotonic() - started

    response, lines, seconds = asyncio.run(ask())
    assert TIMEOUT_S - 0.1 < seconds < TIMEOUT_S + 2
    if is_stream:
        assert response.status_code == 200
        assert lines[-1] == "data: [DONE]" and '"timeout"' in lines[-2] and len(lines) > 10
    else:
        assert response.status_code == 504 and json.loads(lines[0])["error"]["code"] == "timeout"
    server.wait_free()


def test_without_the_key_nothing_and_nobody_learns_it(server):
    for headers in ({}, {"authorization": "Bearer wrong"}):
        for path in ("/v1/models", "/v1/completions", "/tokenize"):
            answer = httpx.post(f"{server.url}{path}", json=LONG, headers=headers)
            assert answer.status_code == 401, path
    assert httpx.get(f"{server.url}/v1/models", headers=HEADERS).status_code == 200
    for path in ("/live", "/ready", "/health", "/version", "/load", "/metrics"):
        assert httpx.get(f"{server.url}{path}").status_code == 200, path
    assert KEY not in server.log.read_text()
    for process in server.descendants():
        assert KEY not in str(process.environ()) + str(process.cmdline()), process.name()


def test_only_this_machine_is_listened_to(server):
    """Other programs may have a port of the same number on the machine's other addresses."""
    port = int(server.url.rpartition(":")[2])
    sockets = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    owners = {c.pid for c in sockets if c.laddr == ("127.0.0.1", port)}
    assert len(owners) == 1
    found = {c.laddr.ip for c in sockets if c.laddr.port == port and c.pid in owners}
    assert found == {"127.0.0.1"}


def test_a_second_signal_ends_what_does_not_finish(server):
    """The last test of this file: it stops the server."""
    check_stop_ends(server, Stream(server, 4000, KEY), signal.SIGTERM, signal.SIGTERM)
