"""`phalanx batch --url`: the requests of a file to a running server, again and again while it is overloaded or away."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.offline.batch_input import BatchError
from cluster.offline.remote import ATTEMPTS, RemoteServer, make_client
from tests.unit.api_fakes import Api, FakeBackend
from tests.unit.test_batch import request, results, run, write


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "requests.jsonl", tmp_path / "results.jsonl"


class Scripted(httpx.AsyncBaseTransport):
    """Answers in turn with statuses, errors, or, at the end, with the API."""

    def __init__(self, *turns: Any) -> None:
        self.turns = list(turns)
        self.requests: list[httpx.Request] = []
        self.api = httpx.ASGITransport(app=Api(FakeBackend("hello")).app)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if not self.turns:
            return await self.api.handle_async_request(request)
        turn = self.turns.pop(0) if len(self.turns) > 1 or self.turns[0] != "always" else 503
        if isinstance(turn, Exception):
            raise turn
        status, headers = turn if isinstance(turn, tuple) else (turn, {})
        return httpx.Response(status, headers=headers, json={"error": {"message": "too busy"}})


def remote(*turns: Any) -> tuple[RemoteServer, Scripted]:
    client = make_client("http://server/v1/", "secret", 4)
    transport = Scripted(*turns)
    client._transport = transport
    return RemoteServer(client, first_wait_s=0.001), transport


def test_a_running_server_answers(paths) -> None:
    source, out = paths
    write(source, request("a"), request("bad", prompt=""), request("\ud800", prompt="\ud800"))
    server, transport = remote()
    batch = run(source, out, server)
    found = {item["custom_id"]: item["response"] for item in results(out)}
    assert [found[name]["status_code"] for name in ("a", "bad", "\ud800")] == [200, 400, 400]
    assert found["a"]["body"]["choices"][0]["text"] == "hel"
    assert batch.speed != "0 output tok/s"
    first = transport.requests[0]
    assert str(first.url) == "http://server/v1/completions"
    assert first.headers["authorization"] == "Bearer secret"
    assert found["a"]["request_id"]


def test_refusals_for_load_are_sent_again(paths) -> None:
    source, out = paths
    write(source, request("a"))
    server, transport = remote((429, {"retry-after": "0"}), 503, httpx.ConnectError("refused"), 502)
    assert run(source, out, server).num_errors == 0
    assert len(transport.requests) == 5 and len(results(out)) == 1


def test_a_server_that_is_away_ends_the_batch(paths, monkeypatch) -> None:
    source, out = paths
    write(source, request("a"))
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds:
            waits.append(seconds)

    monkeypatch.setattr("cluster.offline.remote.asyncio.sleep", sleep)
    refused = [httpx.ConnectError("All connection attempts failed")] * ATTEMPTS
    with pytest.raises(BatchError, match="cannot reach http://server: All connection attempts"):
        run(source, out, remote(*refused)[0])
    assert len(waits) == ATTEMPTS - 1
    busy = [(429, {"retry-after": "7"})] * ATTEMPTS
    with pytest.raises(BatchError, match=f"http://server: too busy .{ATTEMPTS} attempts"):
        run(source, out, remote(*busy)[0])
    assert waits[-ATTEMPTS + 1 :] == [7] * (ATTEMPTS - 1)
    with pytest.raises(BatchError, match="refuses the API key: too busy"):
        run(source, out, remote(401, 401)[0])
    assert results(out) == []


def test_a_failure_of_the_server_is_a_result(paths) -> None:
    source, out = paths
    write(source, request("a"))
    server, _ = remote(500)
    assert run(source, out, server).num_errors == 1
    assert results(out)[0]["response"]["status_code"] == 500


def test_a_wrong_url_of_a_server() -> None:
    with pytest.raises(BatchError, match="--url"):
        make_client("http://[::1", None, 1)
