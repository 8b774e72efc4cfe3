"""The short part of scripts/chaos: a rank dies under streams, and a request that ends ranks is set aside."""

import asyncio
import os
from functools import partial
from pathlib import Path

import httpx
import pytest

from scripts.bench.chaos import HOOKS, streams_under
from scripts.bench.chaos_faults import Failure, Victim, cause
from scripts.bench.chaos_streams import Found, requests_of, stream
from tests.serve.server import Server, running

KINDS = ["kill", "poison"]


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
    with running(tmp_path, checkpoint, cache={"num_blocks": 1024}) as server:
        found, failures = asyncio.run(scenario(server, hooks))
    assert [failure.kind for failure in failures] == KINDS
    assert found.done.total() >= 10
    # Batches differ, and rounding may choose another token in one of them.
    errors = [failed for failed in found.failed if "error" in failed]
    assert not errors and len(found.failed) <= 1, found.failed[:3]
    assert server.log.read_text().count("is set aside: it ends its rank") == 1


async def scenario(server: Server, hooks: Path) -> tuple[Found, list[Failure]]:
    """Return what ten streams found while `KINDS` happened."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        asked = [request for request in requests_of("tiny", 18) if "chat" not in request[1]]
        expected = await asyncio.gather(*(stream(client, *request[1:]) for request in asked))
        victim = Victim(server.process.pid, server.log, client, hooks, 2)
        causes = partial(cause, victim, KINDS, 0.5, 0)
        return await streams_under(client, asked, list(expected), causes, 10, KINDS)
