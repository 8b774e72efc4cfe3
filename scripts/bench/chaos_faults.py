"""The failures of scripts/chaos: signals to processes of a server, and points in the step of a rank that fail."""

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import psutil

from scripts.bench import chaos_control_faults as control
from scripts.bench import chaos_ray_faults, chaos_scarcity
from scripts.bench.chaos_slow import slow
from scripts.bench.chaos_victim import POLL_S, SERVING_S, Victim

STOPPED_S = 5.0
INGRESS_STOPPED_S = 15.0
EXPIRED = "a lease of this ingress has expired"
DELAYED_S = 3.0


@dataclass
class Failure:
    """One failure and what followed; seconds from `at`, None where nothing was seen."""

    kind: str
    at: float
    detected_s: float | None = None
    serving_s: float | None = None
    stages: dict[str, float] = field(default_factory=dict)

    def count_from(self, at: float) -> None:
        """Count the seconds from a later moment."""
        later, self.at = at - self.at, at
        if self.detected_s is not None:
            self.detected_s = max(0.0, self.detected_s - later)
        if self.serving_s is not None:
            self.serving_s = max(0.0, self.serving_s - later)


Fault = Callable[[Victim, random.Random], Coroutine[Any, Any, float | None]]
"""Returns when the failure happened, if not at its call."""


async def kill(victim: Victim, rng: random.Random) -> None:
    """SIGKILL of a rank."""
    rng.choice(await victim.ranks()).kill()


async def kill_two(victim: Victim, rng: random.Random) -> None:
    """SIGKILL of two ranks at once."""
    for process in rng.sample(await victim.ranks(), 2):
        process.kill()


async def kill_in_rebuild(victim: Victim, rng: random.Random) -> None:
    """SIGKILL of a rank, and of another one while the group rebuilds."""
    first, second = rng.sample(await victim.ranks(), 2)
    before = victim.group()[1]
    first.kill()
    await victim.wait_group(lambda state, epoch: state == "rebuilding" or epoch > before)
    await asyncio.sleep(rng.uniform(0, 1.5))
    with contextlib.suppress(psutil.NoSuchProcess):
        second.kill()


async def stop(victim: Victim, rng: random.Random) -> None:
    """SIGSTOP of a rank; its process must be gone in the end."""
    process = rng.choice(await victim.ranks())
    process.send_signal(signal.SIGSTOP)
    await victim.gone(process)


async def stop_and_continue(victim: Victim, rng: random.Random) -> None:
    """SIGSTOP of a rank and SIGCONT after 5 s; a process that was replaced meanwhile must leave."""
    process = rng.choice(await victim.ranks())
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def at_point(point: str) -> Fault:
    """Return the fault of a point in the step of a rank."""

    async def fail(victim: Victim, rng: random.Random) -> float:
        await victim.arm(rng.choice(await victim.ranks()), point)
        return time.monotonic()

    fail.__doc__ = f"A rank fails in {point}."
    return fail


def poison(way: str) -> Fault:
    """Return the fault of a request that ends each rank that runs it."""

    async def fail(victim: Victim, _rng: random.Random) -> None:
        with victim.poisoned(way) as prompt:
            response = await victim.send_poison(prompt)
        assert "request_ended_ranks" in response.text, response.text[:500]

    fail.__doc__ = f"A request that ends its rank each time ({way}); it must be set aside."
    return fail


async def delay(victim: Victim, _rng: random.Random) -> None:
    """Exchanges wait at random for some seconds; nothing else happens."""
    with victim.present("delay"):
        await asyncio.sleep(DELAYED_S)


async def kill_supervisor(victim: Victim, _rng: random.Random) -> None:
    """SIGKILL of the supervisor."""
    for process in victim.processes("ray::Supervisor"):
        process.kill()


async def kill_ingress(victim: Victim, rng: random.Random) -> None:
    """SIGKILL of an HTTP process: its connections end, and its requests leave the ranks."""
    process = rng.choice(victim.processes("ray::ServeReplica"))
    process.kill()
    await victim.gone(process)


async def stop_ingress(victim: Victim, rng: random.Random) -> None:
    """SIGSTOP of an HTTP process for 15 s, longer than its lease: its requests leave the ranks, and come back."""
    process = rng.choice(victim.processes("ray::ServeReplica"))
    expired = victim.count(EXPIRED)
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(INGRESS_STOPPED_S)
    process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + SERVING_S
    while victim.count(EXPIRED) == expired:
        assert time.monotonic() < deadline, "no lease has expired"
        await asyncio.sleep(POLL_S)


FAULTS: dict[str, Fault] = {
    "kill": kill,
    "die": at_point("die"),
    "stop": stop,
    "stop-continue": stop_and_continue,
    "forward": at_point("forward"),
    "dispatch": at_point("dispatch"),
    "ubatch": at_point("ubatch"),
    "commit": at_point("commit"),
    "two": kill_two,
    "rebuild": kill_in_rebuild,
    "poison": poison("raise"),
    "poison-die": poison("die"),
    "delay": delay,
    "supervisor": kill_supervisor,
    "ingress": kill_ingress,
    "ingress-stop": stop_ingress,
    "lost": at_point("lost"),
    "reset": at_point("reset"),
    "server": control.kill_server,
    "supervisor-rebuild": control.kill_supervisor_in_rebuild,
    "supervisor-change": control.kill_supervisor_in_change,
    "two-ingresses": control.kill_under_two_ingresses,
    "poison-many": control.poison_from_many,
    "partition": control.part,
    "slow": slow,
    "corrupt": at_point("corrupt"),
    "garbage": at_point("garbage"),
    "gather": chaos_ray_faults.corrupt_gather,
    "files-ingress": chaos_scarcity.without_files("ray::ServeReplica", "An HTTP process"),
    "files-rank": chaos_scarcity.without_files("RankActor", "A rank"),
    "files-supervisor": chaos_scarcity.without_files("ray::Supervisor", "The supervisor"),
    "memory": chaos_scarcity.no_memory,
    "gcs-stop": chaos_ray_faults.stop_gcs,
    "gcs-stop-kill": chaos_ray_faults.stop_gcs_and_kill,
    "controller": chaos_ray_faults.kill_controller,
    "checkpoint": chaos_ray_faults.checkpoint_gone,
}
OF_ROOT: dict[str, Fault] = {
    "shm": chaos_scarcity.full_shm,
    "disk": chaos_scarcity.full_disk,
    "oom": chaos_scarcity.out_of_memory,
}
"""Failures that only root can cause."""
OWN_FILE_SYSTEMS = {"shm", "disk"}
WITHOUT_REBUILD = {
    *("delay", "supervisor", "ingress", "ingress-stop", "lost", "reset", "corrupt", "garbage"),
    *("gcs-stop", "controller", "partition", "slow"),
}
MAY_PASS = {"stop-continue"}
"""Failures that end by themselves, perhaps before the group notices."""
TWO_RANKS = {"two", "rebuild", "gather", "files-rank"}
UNNOTICED_S = 15.0
BREAKS_CONNECTIONS = {"ingress"}


async def cause(victim: Victim, kinds: Iterable[str], every_s: float, seed: int) -> list[Failure]:
    """Cause failures one after another, each when the group serves, `every_s` seconds apart on average."""
    rng = random.Random(seed)
    failures = []
    for number, kind in enumerate(kinds):
        await asyncio.sleep(every_s * rng.uniform(0.5, 1.5))
        print(f"{number + 1}: {kind}", file=sys.stderr, flush=True)
        failures.append(await cause_one(victim, kind, rng))
    await victim.wait_group(serves)
    await only_ranks(victim)
    return failures


async def cause_one(victim: Victim, kind: str, rng: random.Random) -> Failure:
    """Cause one failure once the group serves, and return when it serves again."""
    before = await victim.wait_group(serves)
    failure = Failure(kind, time.monotonic())
    watching = asyncio.create_task(watch(victim, failure, before))
    try:
        happened = await (FAULTS | OF_ROOT)[kind](victim, rng)
        await watching
    finally:
        watching.cancel()
    if happened is not None:
        failure.count_from(happened)
    return failure


def serves(state: str, _: int) -> bool:
    return state == "serving"


async def watch(victim: Victim, failure: Failure, before: int) -> None:
    """Note when a failure was detected, and when the group serves again."""
    if failure.kind in WITHOUT_REBUILD:
        return
    patience = failure.at + UNNOTICED_S
    may_pass = failure.kind in MAY_PASS

    def noticed(_: str, epoch: int) -> bool:
        return epoch > before or (may_pass and time.monotonic() > patience)

    if await victim.wait_group(noticed) == before:
        return
    failure.detected_s = time.monotonic() - failure.at
    await victim.wait_group(lambda state, epoch: serves(state, epoch) and epoch > before)
    failure.serving_s = time.monotonic() - failure.at
    failure.stages = await victim.stages()


async def only_ranks(victim: Victim) -> None:
    """Return when there are no more rank processes than ranks: all that were replaced have ended."""
    deadline = time.monotonic() + SERVING_S
    while len(found := victim.processes("RankActor")) > victim.num_ranks:
        assert time.monotonic() < deadline, f"{len(found)} processes of {victim.num_ranks} ranks"
        await asyncio.sleep(POLL_S)
