"""Failures of scripts/chaos around a server: Ray's GCS, Serve's controller, the folder of the model."""

import asyncio
import random
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scripts.bench.chaos_victim import Victim

GCS_STOPPED_S = 20.0
FAILED_REBUILDS = 2
MODEL_FOLDER = "model"
"""In the folder of the fault points: a copy of the checkpoint, which the server reads."""


async def stop_gcs(victim: "Victim", _rng: random.Random) -> None:
    """SIGSTOP of Ray's GCS for 20 s; the streams go on."""
    with victim.stopped("gcs_server"):
        await asyncio.sleep(GCS_STOPPED_S)


async def stop_gcs_and_kill(victim: "Victim", rng: random.Random) -> None:
    """SIGSTOP of Ray's GCS for 20 s, in which a rank dies: Ray starts no process before its end."""
    with victim.stopped("gcs_server"):
        rng.choice(await victim.ranks()).kill()
        await asyncio.sleep(GCS_STOPPED_S)


async def kill_controller(victim: "Victim", _rng: random.Random) -> None:
    """SIGKILL of Serve's controller, which Ray starts again."""
    (process,) = victim.processes("ray::ServeController")
    process.send_signal(signal.SIGKILL)
    await victim.gone(process)
    await victim.appears("ray::ServeController")


async def checkpoint_gone(victim: "Victim", rng: random.Random) -> None:
    """The folder of the model is away while a rank dies, until two rebuilds have failed without it."""
    folder, before = victim.folder / MODEL_FOLDER, victim.group()[1]
    away = folder.rename(folder.with_name("away"))
    try:
        rng.choice(await victim.ranks()).kill()
        await victim.wait_group(lambda _, epoch: epoch > before + FAILED_REBUILDS)
    finally:
        away.rename(folder)


async def corrupt_gather(victim: "Victim", rng: random.Random) -> None:
    """A rank dies, and what another one sends to the gather of the new group is changed on its way."""
    first, second = rng.sample(await victim.ranks(), 2)
    changed = asyncio.create_task(victim.arm(second, "gather"))
    first.kill()
    await changed
