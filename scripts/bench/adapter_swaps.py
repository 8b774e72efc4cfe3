"""The longest gap of open streams while an adapter comes from host memory into a slot.

Streams of the model without adapter run, and short requests for adapters come one at a time: first for one adapter that
stays in its slot, then for one adapter more than there are slots in turn, so that each of them is brought in. Both
kinds of requests cost a step with a prompt; what the gaps of the second are longer is the swap.
"""

import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cluster.bench.http import Connection, Endpoint

PATH = "/v1/completions"
PROMPT = [11, 7, 5, 3]
TIMEOUT_S = 600.0
LOADS = "phalanx:lora_slot_loads_total"
REPORTED_S = 2.5  # after which /metrics has what was before
PAUSE_S = 0.1
"""Between two requests for adapters."""


@dataclass(frozen=True)
class SwapLoad:
    """streams and their tokens, and requests for adapters of each kind."""

    streams: int
    tokens: int
    requests: int


@dataclass
class _Stream:
    """One open stream; the times at which bytes came, in perf_counter seconds."""

    connection: Connection
    times: list[float] = field(default_factory=list)

    async def run(self, model: str, tokens: int) -> None:
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True}
        await _send(self.connection, {**body, "stream": True}, self._heard)

    def _heard(self, _data: bytes, now: float) -> None:
        self.times.append(now)

    def longest_gap(self, start: float, end: float) -> float:
        """Return the longest time without bytes that overlaps start .. end."""
        inside = [at for at in self.times if start <= at <= end]
        before = max((at for at in self.times if at < start), default=start)
        after = min((at for at in self.times if at > end), default=end)
        whole = [before, *inside, after]
        return max(later - at for at, later in pairwise(whole))


def measure_swaps(url: str, model: str, adapters: Sequence[str], load: SwapLoad) -> dict[str, Any]:
    """Return the longest gaps in ms around each request, without and with swaps, and the swaps that ranks counted.

    adapters   one more than the server has slots
    """
    found = {}
    for kind, names in (("adapter in its slot", adapters[:1]), ("adapter swapped in", adapters)):
        asyncio.run(_gaps(url, model, names, SwapLoad(1, load.tokens, len(names))))  # into slots
        before = _loads(url)
        gaps_ms = asyncio.run(_gaps(url, model, names, load))
        found[kind] = {
            "longest_gaps_ms": [round(gap, 3) for gap in gaps_ms],
            "median_ms": round(statistics.median(gaps_ms), 3),
            "longest_ms": round(max(gaps_ms), 3),
            "slot_loads": _loads(url) - before,
        }
    return found


async def _gaps(url: str, model: str, names: Sequence[str], load: SwapLoad) -> list[float]:
    endpoint = Endpoint.parse(url)
    streams = [_Stream(Connection(endpoint, {})) for _ in range(load.streams)]
    asking = Connection(endpoint, {})
    tasks = [asyncio.create_task(it.run(model, load.tokens)) for it in streams]
    try:
        while not all(len(it.times) > 2 for it in streams):
            await asyncio.sleep(0.01)
            _check_open(tasks)
        spans = []
        for number in range(load.requests):
            await asyncio.sleep(PAUSE_S)
            start = time.perf_counter()
            name = names[number % len(names)]
            await _send(asking, {"model": name, "prompt": PROMPT, "max_tokens": 1})
            spans.append((start, time.perf_counter()))
        await asyncio.sleep(PAUSE_S)  # the gap that the last one has begun
        _check_open(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        asking.close()
    return [1e3 * max(it.longest_gap(*span) for it in streams) for span in spans]


def _check_open(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done():
            task.result()  # raises what ended it
            raise RuntimeError("a stream ended before the requests did; give streams more tokens")


async def _send(connection: Connection, body: dict[str, Any], sink: Any = None) -> None:
    answer = await connection.request(
        "POST", PATH, json.dumps(body).encode(), timeout_s=TIMEOUT_S, sink=sink
    )
    if answer.status != 200:
        raise RuntimeError(f"HTTP {answer.status}: {answer.body.decode()[:300]}")


def _loads(url: str) -> int:
    """Return the adapters that were copied into slots, of all ranks. Ranks report every second."""
    time.sleep(REPORTED_S)
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    found = [float(line.split()[-1]) for line in lines if line.startswith(LOADS)]
    assert found, f"/metrics has no {LOADS}"
    return round(sum(found))
