"""The shared server of two ranks and two ingress replicas: its metrics, its logs, a replica's death."""

import asyncio
import json
import os
import time
from pathlib import Path

import httpx

from tests.serve.metrics_scrape import Scrape
from tests.serve.open_streams import Stream
from tests.serve.server import Server

NUM_REQUESTS = 24
NUM_SCRAPES = 16  # of which some reach one replica and some the other


def scrape(server: Server) -> Scrape:
    """Over a connection of its own: the kernel spreads those over the replicas."""
    return Scrape(server.get("/metrics").text)


async def send(server: Server, count: int) -> None:
    async def one(index: int) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"prompt": "hello", "max_tokens": 5 + index, "ignore_eos": True}
            headers = {"x-request-id": f"request-{index}"}
            url = f"{server.url}/v1/completions"
            assert (await client.post(url, json=body, headers=headers)).status_code == 200

    await asyncio.gather(*(one(index) for index in range(count)))


def agreed(server: Server) -> Scrape:
    """The counts, when all replicas give the same ones: with a scrape a replica reports its own."""
    deadline = time.monotonic() + 60
    while True:
        scrapes = [scrape(server) for _ in range(NUM_SCRAPES)]
        found = {(ended(one), one.sum("steps_total")) for one in scrapes}
        if len(found) == 1:
            return scrapes[-1]
        assert time.monotonic() < deadline, found


def settled(server: Server) -> Scrape:
    """The counts, when all replicas have reported all requests so far."""
    server.wait_free(60)
    return agreed(server)


def ended(scraped: Scrape) -> float:
    return scraped.sum("request_success_total", finished_reason="length")


def replica_pids(server: Server) -> list[int]:
    return [replica.pid for replica in server.actors("ServeReplica")]


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.25)


def test_one_endpoint_tells_of_all_ranks_and_all_replicas(server):
    before = settled(server)
    asyncio.run(send(server, NUM_REQUESTS))
    wait_for(lambda: ended(scrape(server)) == ended(before) + NUM_REQUESTS)
    found = agreed(server)
    assert ended(found) == ended(before) + NUM_REQUESTS

    def added(name: str) -> float:
        return found.sum(name) - before.sum(name)

    assert len(found.values("ingress_cpu_seconds_total", "ingress")) == 2
    assert added("time_to_first_token_seconds_count") == NUM_REQUESTS
    tokens = sum(5 + index for index in range(NUM_REQUESTS))
    assert added("request_generation_tokens_sum") == tokens
    assert added("generation_tokens_total") >= tokens
    assert added("inter_token_latency_seconds_count") > 0
    assert found.values("steps_total", "rank") == ["0", "1"]
    for rank in ("0", "1"):
        assert found.sum("steps_total", rank=rank) > 0
        assert found.sum("step_time_seconds_total", rank=rank, part="forward") > 0
        assert found.sum("rank_resident_memory_bytes", rank=rank) > 1e7
        assert found.sum("expert_rows_total", rank=rank) > 0
        assert 0 < found.sum("expert_load_balancedness", rank=rank) <= 1
    assert added("request_queue_time_seconds_count") >= NUM_REQUESTS
    assert found.sum("iteration_tokens_total_count") == found.sum("steps_total")


def test_log_lines_of_all_processes_reach_the_console(server):
    def lines() -> list[dict]:
        text = Path(server.log).read_text()
        whole = text[: text.rfind("\n") + 1]  # the last line may be written just now
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    asyncio.run(send(server, 2))
    names = {"request-0", "request-1"}
    wait_for(lambda: {line.get("request_id") for line in lines()} >= names)
    wait_for(lambda: {line["rank"] for line in lines() if line.get("steps")} >= {0, 1})
    busy = next(line for line in lines() if line.get("rank") == 0 and line.get("steps"))
    assert busy["process"] == "rank 0" and "vote" in busy["step_ms"]
    assert "output tok/s" in busy["message"]
    request = next(line for line in lines() if line.get("request_id") == "request-0")
    assert request["process"].startswith("ingress ") and request["level"] == "info"


def test_a_dead_replica_takes_no_counts_with_it(server):
    before = ended(settled(server))
    streams = [Stream(server, 1000) for _ in range(6)]
    (victim, *_) = replica_pids(server)
    os.kill(victim, 9)
    for stream in streams:
        stream.join(60)
        assert stream.broken or stream.lines[-1] == "data: [DONE]", "only its own connections end"
    before += sum(not stream.broken for stream in streams)

    def both_again() -> bool:
        try:
            now = ended(scrape(server))
        except httpx.HTTPError:  # this connection was the dead one's
            return False
        pids = replica_pids(server)
        return len(pids) == 2 and victim not in pids and now >= before

    wait_for(both_again, 120)
    server.wait_free(60)  # the lease has expired
    asyncio.run(send(server, 4))
    wait_for(lambda: ended(scrape(server)) == before + 4)
