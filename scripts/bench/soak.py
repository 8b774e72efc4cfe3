"""Serves mixed traffic for hours, a failure a minute, and compares answers with those of the undisturbed server.

Clients send requests of all kinds, short and long, streamed and whole, with shared beginnings; some leave before the
end. Failures of all kinds follow each other. An answer fails as in scripts/chaos; one that was left must be a beginning
of the undisturbed answer. So does a time without an item that is longer than --timeout-s, a request that stays on a
rank without its client, and a figure that grows after the first ten minutes by more than its bound. A sample is taken
every 10 s.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil

from scripts.bench.chaos_faults import BREAKS_CONNECTIONS, Failure, cause_one, only_ranks
from scripts.bench.chaos_judge import control, judge
from scripts.bench.chaos_pauses import pauses
from scripts.bench.chaos_streams import MODEL, Found, reference
from scripts.bench.chaos_victim import Victim
from scripts.bench.servers import ServerProcess
from scripts.bench.soak_curve import (
    ALL_ROLES,
    WINDOW_S,
    Curve,
    as_columns,
    broken_bounds,
    windows,
)
from scripts.bench.soak_traffic import Traffic, mixed_requests

WARM_UP = 0.4
"""The warm-up is at most this part of the time."""
GROW_MB = dict.fromkeys(ALL_ROLES, 48.0) | {"rank": 96.0, "ingress": 64.0}
"""Default bounds of memory: allocators keep what the longest prompts took."""
TOO_MANY = 200
"""Failed answers after which a run ends."""
QUIET_S = 30.0
"""Time for the requests of the last clients to leave the ranks."""


async def soak(options: argparse.Namespace, server: ServerProcess, folder: Path) -> dict[str, Any]:
    """Serve for `options.soak` hours. Returns the results."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=options.timeout_s, limits=limits
    ) as client:
        victim = Victim(server.pid, folder / "log", client, folder, options.ranks)
        asked = mixed_requests(MODEL, options.requests)
        requests, expected = await reference(client, asked)
        print(f"{len(requests)} of {len(asked)} requests have one answer", file=sys.stderr)
        found, failures = Found(), list[Failure]()
        may_break = not BREAKS_CONNECTIONS.isdisjoint(options.faults)
        traffic = Traffic(client, requests, expected, found, options.timeout_s, may_break=may_break)

        def facts() -> dict[str, float]:
            return traffic.facts() | {"failures": len(failures)}

        curve, ended = Curve(server.pid, options.app_name, facts), asyncio.Event()
        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(curve.follow(ended))
            for number in range(options.streams):
                tasks.create_task(traffic.keep(options.seed + number, ended))
            await disturb(options, victim, found, failures, started + options.soak * 3600)
            ended.set()
        curve.take()  # with the last answers
        seconds = time.monotonic() - started
        found.failed += await left_behind(client, victim)
        rounding = await judge(victim, client, requests, found)
        noise = await control(victim, client, requests, expected)
    warm_up_s = min(WINDOW_S, WARM_UP * seconds)
    return {
        "seconds": round(seconds),
        "different_requests": len(requests),
        "requests_without_one_answer": len(asked) - len(requests),
        "answered": dict(found.done),
        "clients_left": traffic.left,
        "failed": found.failed,
        "rounding": [str(difference) for difference in rounding],
        "noise_without_failures": asdict(noise),
        "connections_ended_with_their_ingress": found.broken,
        "failures": pauses(failures, found),
        "resources": {
            "warm_up_s": round(warm_up_s),
            "bounds_mb": options.grow_mb,
            "thread_names": curve.thread_names,
            "grew": broken_bounds(curve.samples, warm_up_s, options.grow_mb),
        },
        "ten_minutes": windows(curve.samples),
        "curve": as_columns(curve.samples),
    }


async def disturb(
    options: argparse.Namespace,
    victim: Victim,
    found: Found,
    failures: list[Failure],
    until: float,
) -> None:
    """Cause failures, one in `options.every_s` on average, until that time.

    A failure that does not go as its kind says counts as a failed answer.
    """
    rng = random.Random(options.seed)
    kinds = drawn(options.faults, rng)
    at = time.monotonic()
    while time.monotonic() < until and len(found.failed) < TOO_MANY:
        at = max(time.monotonic(), at + options.every_s * rng.uniform(0.5, 1.5))
        await asyncio.sleep(min(at, until) - time.monotonic())
        if at >= until:
            return
        kind = next(kinds)
        print(f"{len(failures) + 1}: {kind}", flush=True)
        try:
            failures.append(await cause_one(victim, kind, rng))
        except (AssertionError, LookupError, httpx.HTTPError, psutil.Error) as error:
            found.failed.append(f"failure {kind}: {error!r}")
            print(found.failed[-1], flush=True)


def drawn(kinds: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Yield kinds without end: all of them in an order at random, then again in another one."""
    for _ in count():
        yield from rng.sample(kinds, len(kinds))


async def left_behind(client: httpx.AsyncClient, victim: Victim) -> list[str]:
    """Return what is still there without clients: requests on ranks, processes of ranks that were replaced."""
    try:
        await only_ranks(victim)
    except AssertionError as error:
        return [str(error)]
    deadline = time.monotonic() + QUIET_S
    while True:
        try:
            ranks = (await client.get("/ranks")).json()["ranks"]
        except (httpx.HTTPError, ValueError) as error:
            return [f"/ranks after the last client: {error!r}"]
        present = {rank["rank"]: rank["running"] + rank["waiting"] for rank in ranks}
        if not any(present.values()):
            return []
        if time.monotonic() > deadline:
            return [f"requests without clients, by rank: {present}"]
        await asyncio.sleep(1.0)
