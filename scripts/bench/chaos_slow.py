"""The failure `slow` of scripts/chaos: a rank has its process for a fifth of the time, and must be named."""

import asyncio
import random
import signal
import sys
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from scripts.bench.chaos_victim import Victim

RUN_S, STOP_S = 0.02, 0.08
NAMED_S = 10.0
"""Time in which a slow rank must be named by the log and by the metrics."""
CLEARED_S = 30.0


async def slow(victim: "Victim", rng: random.Random) -> None:
    """A rank runs for 20 of each 100 ms; it must be named within 10 s, and no longer afterwards."""
    process = rng.choice(await victim.ranks())
    slowing = asyncio.create_task(_slow_down(process))
    began = time.monotonic()
    try:
        await _until(victim, process.pid, named=True, seconds=NAMED_S)
        print(f"slow: named after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    finally:
        slowing.cancel()
        await asyncio.gather(slowing, return_exceptions=True)
    await _until(victim, process.pid, named=False, seconds=CLEARED_S)


async def _slow_down(process: psutil.Process) -> None:
    try:
        while True:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOP_S)
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(RUN_S)
    finally:
        process.send_signal(signal.SIGCONT)


async def _until(victim: "Victim", pid: int, *, named: bool, seconds: float) -> None:
    """Return when the log and the metrics name the rank of process `pid`, or no longer do."""
    deadline = time.monotonic() + seconds
    while True:
        rank = victim.slow_rank(pid)
        slow_ranks = await victim.slow_ranks()
        if rank is not None and (rank in slow_ranks) == named:
            return
        assert time.monotonic() < deadline, (
            f"process {pid} of rank {rank}: the metrics name {slow_ranks} after {seconds:g} s"
        )
        await asyncio.sleep(0.25)
