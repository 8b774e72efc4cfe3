"""A new rank starts in a process that Ray has started before, which has imported torch; over real Ray."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray

from cluster.commands.start import RAY_ENVIRONMENT
from cluster.group import placement
from cluster.group.launcher import NAMESPACE, RankLauncher
from tests.unit.ray_fakes import rank_config

PATIENCE_S = 60.0


class Host:
    """In place of the supervisor."""

    async def ping(self) -> None:
        """As the supervisor's."""

    async def pid(self) -> int:
        return os.getpid()

    async def replace(self) -> tuple[set[int], int, int]:
        """Return the spare processes after the start of a rank, and the processes of two actors that start then.

        The first is no rank, as a supervisor that Ray starts anew; the second replaces the rank.
        """
        config = rank_config(1)
        launcher = RankLauncher(config, name="app:1", joined=False)
        (first,) = await launcher.launch(PATIENCE_S)
        before = placement.located(0, await first.describe.remote())
        await launcher.start_spares()
        async with asyncio.timeout(PATIENCE_S):
            while not (idle := _idle_processes()):
                await asyncio.sleep(0.1)
        other: Any = ray.remote(Host).options(num_cpus=0).remote()
        other_pid = await other.pid.remote()
        launcher.end(first, before)
        second = await launcher.start(0, config, 0)
        pid = (await second.describe.remote())["pid"]
        launcher.kill()
        return idle, other_pid, pid


def _idle_processes() -> set[int]:
    """The processes without an actor that have imported torch."""
    found = psutil.Process(os.getppid()).children()
    return {
        process.pid
        for process in found
        if "ray::IDLE" in " ".join(process.cmdline())
        and any("libtorch" in area.path for area in process.memory_maps())
    }


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
    yield
    ray.shutdown()


def test_a_new_rank_takes_the_spare_process_and_no_other_actor_does(local_ray: None) -> None:
    host: Any = ray.remote(Host).options(num_cpus=0).remote()
    spare, other, rank = ray.get(host.replace.remote(), timeout=2 * PATIENCE_S)
    assert rank in spare and other not in spare, (spare, other, rank)
