"""Failures of scripts/chaos by scarcity: a process has no descriptors or memory left, or the machine no space.

Each lasts some seconds, in which a rank dies, so that the server must make new processes, connections and shared memory
while it lacks something. Space runs out in file systems of the server's own, see `own_file_systems`.
"""

import asyncio
import contextlib
import errno
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from scripts.bench.chaos_faults import Fault
    from scripts.bench.chaos_victim import Victim

SCARCE_S = 6.0
SHM_BYTES, DISK_BYTES = 512 * 1024 * 1024, 1024 * 1024 * 1024
DISK = "disk"
"""In the folder of the fault points: the file system of Ray's session and of compiled kernels."""
BLOCK = bytes(1024 * 1024)
REMOVALS = 100
REFILL_S = 0.05
FAILED_REBUILDS = 2
CGROUPS = Path("/sys/fs/cgroup")
LEFT_BYTES = 96 * 1024 * 1024
"""Memory that a process may take until the kernel ends it."""
MOUNT = """mount -t tmpfs -o size="$1" tmpfs /dev/shm &&
mount -t tmpfs -o size="$2" tmpfs "$3" && shift 3 && exec "$@" """


def own_file_systems(command: list[str], folder: Path) -> list[str]:
    """Return a command with a /dev/shm and a folder DISK of its own, which can be filled; needs root."""
    disk = folder / DISK
    disk.mkdir()
    sizes = [str(SHM_BYTES), str(DISK_BYTES), str(disk)]
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        MOUNT,
        "sh",
        *sizes,
        *command,
    ]


def without_files(title: str, name: str) -> "Fault":
    """Return the fault of a process with this title that can open nothing more."""

    async def fail(victim: "Victim", rng: random.Random) -> None:
        ranks = await victim.ranks()
        process = rng.choice(ranks if title == "RankActor" else victim.processes(title))
        async with no_descriptors(process):
            rng.choice([rank for rank in ranks if rank != process]).kill()
            await asyncio.sleep(SCARCE_S)

    fail.__doc__ = (
        f"{name} can open no file and no socket for {SCARCE_S:g} s, in which another rank dies."
    )
    return fail


@contextlib.asynccontextmanager
async def no_descriptors(process: psutil.Process) -> AsyncIterator[None]:
    """Let a process open nothing while the block runs; what is open stays open."""
    taken = {int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_NOFILE, before)


async def full_shm(victim: "Victim", rng: random.Random) -> None:
    """/dev/shm is full while a rank dies, until two rebuilds have failed without space."""
    before = victim.group()[1]
    async with full(victim.root / "dev" / "shm"):
        rng.choice(await victim.ranks()).kill()
        await victim.wait_group(lambda _, epoch: epoch > before + FAILED_REBUILDS)


async def full_disk(victim: "Victim", rng: random.Random) -> None:
    """The disk of Ray's session, its logs and compiled kernels is full for 6 s, in which a rank dies."""
    async with full(victim.root / str(victim.folder / DISK).lstrip("/")):
        rng.choice(await victim.ranks()).kill()
        await asyncio.sleep(SCARCE_S)


@contextlib.asynccontextmanager
async def full(folder: Path) -> AsyncIterator[None]:
    """Leave no space in the file system of a folder while the block runs, also where other files are removed."""
    path = folder / "chaos-fills-this"
    with path.open("wb", buffering=0) as file:
        _fill(file.fileno())
        filling = asyncio.create_task(_keep_full(file.fileno()))
        try:
            yield
        finally:
            filling.cancel()
            path.unlink()


async def _keep_full(file: int) -> None:
    while True:
        await asyncio.sleep(REFILL_S)
        _fill(file)


def _fill(file: int) -> None:
    """Write until there is no space."""
    try:
        while True:
            os.write(file, BLOCK)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


async def no_memory(victim: "Victim", rng: random.Random) -> float:
    """A rank gets no memory from the kernel: its next large allocation is an error."""
    process = rng.choice(await victim.ranks())
    before = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, before[1]))
    try:
        await victim.arm(process, "memory")
        happened = time.monotonic()
        await asyncio.sleep(SCARCE_S)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_AS, before)
    return happened


async def out_of_memory(victim: "Victim", rng: random.Random) -> float:
    """The kernel ends a rank because the memory of its cgroup is used up."""
    process = rng.choice(await victim.ranks())
    async with memory_group(process):
        await victim.arm(process, "memory")
        happened = time.monotonic()
        await victim.gone(process)
    return happened


@contextlib.asynccontextmanager
async def memory_group(process: psutil.Process) -> AsyncIterator[None]:
    """Move a process to a cgroup of its own, where it may take LEFT_BYTES more; needs root."""
    first = (
        CGROUPS / "memory"
    ).is_dir()  # version 1 of cgroups: what was taken before does not count
    group = (CGROUPS / "memory" if first else CGROUPS) / f"phalanx-chaos-{process.pid}"
    group.mkdir()
    try:
        limit = LEFT_BYTES if first else LEFT_BYTES + process.memory_info().rss
        name = "memory.limit_in_bytes" if first else "memory.max"
        (group / name).write_text(str(limit))
        (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        await _remove(group)


async def _remove(group: Path) -> None:
    """Remove a cgroup, once its process is no zombie any more."""
    for _ in range(REMOVALS):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{group} cannot be removed")
