"""The supervisor as a detached actor of Ray: created once for each application, found by its name, restarted by Ray."""

import asyncio
import logging
import warnings
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config.phalanx_config import PhalanxConfig
from cluster.supervisor import orphans
from cluster.supervisor.launcher import NAMESPACE
from cluster.supervisor.saved_state import SavedState
from cluster.supervisor.status import GroupHealth
from cluster.supervisor.supervisor import Supervisor

logger = logging.getLogger(__name__)

POLL_S = 0.1
SAVE_S = 5.0
"""Time for Ray's GCS to keep the state of the groups."""

SupervisorHandle = Any  # ray.actor.ActorHandle of SupervisorActor


def _sweep() -> None:
    """End what earlier servers have left. After an error this server starts all the same, on other places."""
    try:
        orphans.sweep()
    except Exception as error:
        logger.warning("ranks of earlier servers may remain: %r", error)


class SupervisorActor(Supervisor):
    """The supervisor as a Ray actor, in its first process or a later one."""

    async def __init__(self, config: PhalanxConfig):  # type: ignore[misc]  # Ray awaits it
        super().__init__(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own code calls a deprecated method of its own
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._saved = SavedState(str(ray.get_runtime_context().get_actor_id()))
        if restarted:
            await self.recover(await self._saved.load())
        elif config.cluster.ray_address is not None:
            await asyncio.to_thread(_sweep)

    async def _save_state(self) -> None:
        """Keep the state in Ray's GCS. A GCS that does not answer delays no rebuild by more than SAVE_S."""
        try:
            async with asyncio.timeout(SAVE_S):
                await self._saved.save(self._state)
        except Exception as error:  # Ray's client of the GCS raises many kinds
            logger.warning("Ray's GCS keeps no state of the groups now: %r", error)

    async def stop(self) -> None:
        """Stop all groups and give back their resources."""
        await super().stop()
        await self._saved.delete()


def supervisor_name(config: PhalanxConfig) -> str:
    """The actor's name in NAMESPACE; one for each Serve application."""
    return f"supervisor:{config.serve.app_name}"


def create(config: PhalanxConfig) -> SupervisorHandle:
    """Create the supervisor of this configuration. Raises ValueError if its application has one already."""
    try:
        return _create(config, get_if_exists=False)
    except ValueError as error:  # Ray has an actor of this name
        raise ValueError(
            f"application {config.serve.app_name!r} is already running in this Ray cluster; "
            "stop it first, or give this one another serve.app_name"
        ) from error


def get_or_create(config: PhalanxConfig) -> SupervisorHandle:
    """The supervisor of this configuration, created if there is none."""
    return _create(config, get_if_exists=True)


def find(config: PhalanxConfig) -> SupervisorHandle | None:
    """The supervisor of this configuration's application; None if there is none."""
    try:
        return ray.get_actor(supervisor_name(config), NAMESPACE)
    except ValueError:
        return None


def _create(config: PhalanxConfig, *, get_if_exists: bool) -> SupervisorHandle:
    """Create it on the node of this process, which has the model.

    The affinity is hard, because Ray ignores a soft one for actors without CPUs. Ray restarts the supervisor there when
    its process ends, and sends calls that got no answer again. No records of calls: see placement.actor_options.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(SupervisorActor)
    return actor_class.options(
        name=supervisor_name(config),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=get_if_exists,
        num_cpus=0,
        max_concurrency=1000,
        enable_task_events=False,
        scheduling_strategy=here,
        max_restarts=-1,
        max_task_retries=-1,
    ).remote(config)


async def start(config: PhalanxConfig, *, replace_failed: bool) -> SupervisorHandle:
    """The supervisor of this configuration, created and started if there is none.

    replace_failed: end a supervisor of failed groups, and create another. A server that nothing else
    watches, as under `serve run`, recovers by this; several ingresses may do it at once.
    Raises ValueError when a supervisor of this name runs another configuration.
    """
    while True:
        handle = get_or_create(config)
        try:
            healths: list[GroupHealth] = await handle.healths.remote()
            if not replace_failed or not all(health.ended for health in healths):
                await handle.start.remote(config)
                return handle
            reasons = "; ".join(health.error for health in healths)
            logger.warning("replacing a failed supervisor: %s", reasons)
            await handle.exit.remote()
        except ActorDiedError as error:
            if not replace_failed or error.actor_init_failed:
                raise
            await asyncio.sleep(POLL_S)  # until its name is free
