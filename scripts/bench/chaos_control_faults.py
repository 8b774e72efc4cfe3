"""Failures of scripts/chaos in the control plane: supervisors, ingresses, the network between an ingress and a rank."""

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from scripts.bench.chaos_victim import Victim

PARTITION_S = 20.0
NOTICED_S = 10.0
NUM_POISONED = 4
RETRIES = 2
POISON_REBUILDS = 4
"""Three trials after the first failure; all copies of the request run at the same time."""
REBUILD_PART_S = 1.5
CHANGE_S = 120.0
CUT_OFF = "cannot be reached; other ranks go on"


async def kill_server(victim: "Victim", _rng: random.Random) -> None:
    """SIGKILL of the supervisor and of all ranks at once."""
    for process in (*victim.processes("ray::Supervisor"), *await victim.ranks()):
        process.kill()


async def kill_supervisor_in_rebuild(victim: "Victim", rng: random.Random) -> None:
    """SIGKILL of a rank, and of the supervisor while it rebuilds the group."""
    before = victim.group()[1]
    rng.choice(await victim.ranks()).kill()
    await victim.wait_group(lambda state, epoch: state == "rebuilding" or epoch > before)
    await asyncio.sleep(rng.uniform(0, REBUILD_PART_S))
    await kill_supervisor(victim)


async def kill_supervisor_in_change(victim: "Victim", rng: random.Random) -> None:
    """SIGKILL of the supervisor while it replaces the processes of all ranks for an operator, who gets an answer."""
    restart = asyncio.create_task(victim.operate("restart", CHANGE_S))
    before = {process.pid for process in await victim.ranks()}
    deadline = time.monotonic() + CHANGE_S
    while {process.pid for process in victim.processes("RankActor")} <= before:
        assert time.monotonic() < deadline and not restart.done(), "no process starts"
        await asyncio.sleep(0.01)
    await asyncio.sleep(rng.uniform(0, REBUILD_PART_S))
    await kill_supervisor(victim)
    answer = await restart
    assert answer.status_code in (200, 400, 503), answer.text[:500]


async def kill_supervisor(victim: "Victim") -> None:
    for process in victim.processes("ray::Supervisor"):
        process.kill()


async def kill_under_two_ingresses(victim: "Victim", rng: random.Random) -> None:
    """SIGKILL of a rank while two HTTP processes have streams: each brings its own to the next epoch."""
    ingresses = victim.processes("ray::ServeReplica")
    assert len(ingresses) >= 2, "the server has one HTTP process"
    assert all(map(num_clients, ingresses)), "an HTTP process has no client"
    rng.choice(await victim.ranks()).kill()


def num_clients(ingress: psutil.Process) -> int:
    """The connections of clients that an HTTP process has."""
    links = ingress.net_connections("tcp")
    ports = {link.laddr.port for link in links if link.status == psutil.CONN_LISTEN}
    return sum(link.laddr.port in ports and bool(link.raddr) for link in links)


async def poison_from_many(victim: "Victim", _rng: random.Random) -> None:
    """Several clients send a request at once that ends its rank each time, and send it again after an error."""
    before = victim.group()[1]
    with victim.poisoned("die") as prompt:
        numbers = await asyncio.gather(
            *(_with_retries(victim, prompt) for _ in range(NUM_POISONED))
        )
    assert numbers == [1] * NUM_POISONED, f"attempts of the clients: {numbers}"
    epoch = await victim.wait_group(lambda state, epoch: state == "serving" and epoch > before)
    assert epoch - before <= POISON_REBUILDS, f"{epoch - before} rebuilds for one request"


async def _with_retries(victim: "Victim", prompt: str) -> int:
    """Send a request as OpenAI's client does; return the number of attempts until the final answer."""
    for attempt in range(1 + RETRIES):
        answer = await victim.send_poison(prompt)
        if answer.headers.get("x-should-retry") == "false":
            assert "request_ended_ranks" in answer.text, answer.text[:500]
            return attempt + 1
    raise AssertionError(f"the last answer allows a retry: {answer.text[:500]}")


async def part(victim: "Victim", rng: random.Random) -> None:
    """An HTTP process and a rank get no packet of each other for 20 s; both reach all other processes."""
    ingress = rng.choice(victim.processes("ray::ServeReplica"))
    rank = rng.choice(await victim.ranks())
    noticed = victim.count(CUT_OFF)
    began = time.monotonic()
    with _parted(victim, ingress, rank):
        while victim.count(CUT_OFF) == noticed:
            assert time.monotonic() - began < PARTITION_S, "the partition is not noticed"
            await asyncio.sleep(0.1)
        seconds = time.monotonic() - began
        print(f"noticed after {seconds:.1f} s", flush=True)
        await asyncio.sleep(PARTITION_S - seconds)
    assert seconds <= NOTICED_S, f"noticed after {seconds:.1f} s"


@contextlib.contextmanager
def _parted(victim: "Victim", one: psutil.Process, other: psutil.Process) -> Iterator[None]:
    """Cut two processes off from each other, see fault_hooks."""
    files = {
        victim.folder / f"{one.pid}.partition": other,
        victim.folder / f"{other.pid}.partition": one,
    }
    for path, peer in files.items():
        path.write_text(str(peer.pid))
    try:
        yield
    finally:
        for path in files:
            path.unlink()
