"""A real server of two ranks and two ingress replicas: its metrics, its logs, `phalanx top`, and a replica's death."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.commands.top_metrics import Scrape
from tests.serve.open_streams import Stream, check_drain
from tests.serve.server import ROOT, Server, running

NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory, checkpoint) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("observed")
    sections = {
        "model": {"max_model_len": 4096},
        "cache": {"num_blocks": 2048},
        "serve": {"replicas": 2, "log_format": "json", "access_log": True},
    }
    with running(folder, checkpoint, **sections) as server:
        yield server


def scrape(server: Server) -> Scrape:
    """Over a connection of its own: the kernel spreads those over the replicas."""
    return Scrape(httpx.get(f"{server.url}/metrics", timeout=30).text, time.monotonic())


async def send(server: Server, count: int) -> None:
    async def one(index: int) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"prompt": "hello", "max_tokens": 5 + index, "ignore_eos": True}
            headers = {"x-request-id": f"request-{index}"}
            url = f"{server.url}/v1/completions"
            assert (await client.post(url, json=body, headers=headers)).status_code == 200

    await asyncio.gather(*(one(index) for index in range(count)))


def ended(scraped: Scrape) -> float:
    return scraped.sum("request_success_total", finished_reason="length")


def replica_pids(server: Server) -> list[int]:
    return [p.pid for p in server.descendants() if "ServeReplica" in " ".join(p.cmdline())]


def wait_for(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.25)


@pytest.mark.timeout(400)
def test_one_endpoint_tells_of_all_ranks_and_all_replicas(two_replicas):
    asyncio.run(send(two_replicas, NUM_REQUESTS))
    wait_for(lambda: ended(scrape(two_replicas)) == NUM_REQUESTS)
    scrapes = [scrape(two_replicas) for _ in range(8)]
    assert {ended(found) for found in scrapes} == {NUM_REQUESTS}
    found = scrapes[-1]
    assert len(found.values("ingress_cpu_seconds_total", "ingress")) == 2
    assert found.sum("time_to_first_token_seconds_count") == NUM_REQUESTS
    tokens = sum(5 + index for index in range(NUM_REQUESTS))
    assert found.sum("request_generation_tokens_sum") == tokens
    assert found.sum("generation_tokens_total") >= tokens
    assert found.sum("inter_token_latency_seconds_count") > 0
    assert found.values("steps_total", "rank") == ["0", "1"]
    for rank in ("0", "1"):
        assert found.sum("steps_total", rank=rank) > 0
        assert found.sum("step_time_seconds_total", rank=rank, part="forward") > 0
        assert found.sum("rank_resident_memory_bytes", rank=rank) > 1e7
        assert found.sum("expert_rows_sampled_total", rank=rank) > 0
        assert 0 < found.sum("expert_load_balancedness", rank=rank) <= 1
    assert found.sum("request_queue_time_seconds_count") >= NUM_REQUESTS
    assert found.sum("iteration_tokens_total_count") == found.sum("steps_total")


def test_top_reads_it(two_replicas):
    command = [sys.executable, "-m", "cluster.cli", "top", two_replicas.url, "--once", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["model"] == "tiny" and [row["rank"] for row in seen["ranks"]] == [0, 1]


def test_log_lines_of_all_processes_reach_the_console(two_replicas):
    def lines() -> list[dict]:
        text = Path(two_replicas.log).read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    asyncio.run(send(two_replicas, 2))
    wait_for(lambda: any(line.get("request_id") == "request-1" for line in lines()))
    wait_for(lambda: {line["rank"] for line in lines() if "steps" in line} >= {0, 1})
    busy = next(line for line in lines() if line.get("rank") == 0 and "steps" in line)
    assert busy["process"] == "rank 0" and busy["steps"] > 0 and "vote" in busy["step_ms"]
    assert "output tok/s" in busy["message"]
    request = next(line for line in lines() if line.get("request_id") == "request-0")
    assert request["process"].startswith("ingress ") and request["level"] == "info"


@pytest.mark.timeout(400)
def test_a_dead_replica_takes_no_counts_with_it(two_replicas):
    time.sleep(3)  # longer than the interval at which replicas report
    before = ended(scrape(two_replicas))
    assert before >= NUM_REQUESTS
    streams = [Stream(two_replicas, 1000) for _ in range(6)]
    (victim, *_) = replica_pids(two_replicas)
    os.kill(victim, 9)
    for stream in streams:
        stream.join(60)
        assert stream.broken or stream.lines[-1] == "data: [DONE]", "only its own connections end"
    before += sum(not stream.broken for stream in streams)

    def both_again() -> bool:
        try:
            now = ended(scrape(two_replicas))
        except httpx.HTTPError:  # this connection was the dead one's
            return False
        pids = replica_pids(two_replicas)
        return len(pids) == 2 and victim not in pids and now >= before

    wait_for(both_again, 120)
    two_replicas.wait_free(60)  # the lease has expired
    asyncio.run(send(two_replicas, 4))
    wait_for(lambda: ended(scrape(two_replicas)) == before + 4)


def test_sigterm_lets_streams_finish_and_no_request_in(two_replicas):
    """The last test of this file: it stops the server."""
    check_drain(two_replicas, [Stream(two_replicas, 1000) for _ in range(4)])
