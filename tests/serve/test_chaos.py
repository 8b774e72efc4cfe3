"""The short part of scripts/chaos: a rank dies at the start and under streams; a request that ends ranks."""

import asyncio
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from scripts.bench.chaos import HOOKS, streams_under
from scripts.bench.chaos_faults import Failure, cause
from scripts.bench.chaos_judge import judge
from scripts.bench.chaos_streams import Found, requests_of, stream
from scripts.bench.chaos_victim import Victim
from tests.serve.server import START_TIMEOUT_S, Server, running

KINDS = ["kill", "poison"]
pytestmark = pytest.mark.exhaustive


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the fault points of a server that starts now."""
    folder = tmp_path / "faults"
    folder.mkdir()
    paths = [str(HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PHALANX_FAULTS", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return folder


def test_streams_go_on_while_ranks_end_by_a_signal_and_by_a_request(tmp_path, checkpoint, hooks):
    cache = {"num_blocks": 1024}
    with running(tmp_path, checkpoint, meanwhile=kill_a_rank, cache=cache) as server:
        assert "start failed at stage" in server.log.read_text(), "too late to prove anything"
        found, failures = asyncio.run(scenario(server, hooks))
    assert [failure.kind for failure in failures] == KINDS
    assert found.done.total() >= 10
    assert not found.failed, found.failed[:3]
    assert server.log.read_text().count("is set aside: it ends its rank") == 1


def kill_a_rank(server: Server) -> None:
    """End a rank that has not served yet."""
    deadline = time.monotonic() + START_TIMEOUT_S
    ranks: list[psutil.Process] = []
    while not ranks:
        assert time.monotonic() < deadline and server.process.poll() is None
        with suppress(psutil.NoSuchProcess):
            ranks = server.ranks()
    ranks[-1].kill()


async def scenario(server: Server, hooks: Path) -> tuple[Found, list[Failure]]:
    """Return what ten streams found while `KINDS` happened."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        asked = [request for request in requests_of("tiny", 18) if "chat" not in request[1]]
        expected = await asyncio.gather(*(stream(client, *request[1:]) for request in asked))
        victim = Victim(server.process.pid, server.log, client, hooks, 2)
        causes = partial(cause, victim, KINDS, 0.5, 0)
        found, failures = await streams_under(client, asked, list(expected), causes, 10, KINDS)
        await judge(victim, client, asked, found)
        return found, failures
