"""The supervisor: a detached actor that owns the groups of one served model and the leases of its ingresses.

It starts and watches the groups, and ends itself with them when no ingress is left, so that no process stays behind.
"""

import asyncio
import logging
import time
import warnings
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config.changes import RESTART, SCALE, changed_config
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import check_num_ranks, resolve_rank_config
from cluster.metrics.metrics import GAUGES
from cluster.metrics.snapshot import Snapshot, SnapshotTotals
from cluster.supervisor.group import Group
from cluster.supervisor.launcher import NAMESPACE, RankLauncher
from cluster.supervisor.leases import LEASE_S, Leases
from cluster.supervisor.placement import num_gpus
from cluster.supervisor.saved_config import SavedConfig
from cluster.supervisor.status import GroupHealth, GroupMembers, GroupStatus
from workers import hub
from workers.config import RankConfig
from workers.log import set_up_logging
from workers.rank.rank_info import RankTrace

logger = logging.getLogger(__name__)

POLL_S = 0.1
NODES_S = 2.0
"""Interval between two looks for nodes that Ray drains."""
LAUNCHER_LEASE_S = 60.0
"""Time without a heartbeat of `phalanx serve` after which its server ends."""

SupervisorHandle = Any  # ray.actor.ActorHandle of Supervisor


@dataclass(frozen=True)
class Registration:
    """What an ingress gets with a lease: its id, and the members of every group."""

    lease_id: str
    groups: list[GroupMembers]


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
    its process ends, and sends calls that got no answer again.
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
            logger.warning("replacing a failed supervisor: %s", healths[0].error)
            await handle.exit.remote()
        except ActorDiedError as error:
            if not replace_failed or error.actor_init_failed:
                raise
            await asyncio.sleep(POLL_S)  # until its name is free


class Supervisor:
    """Creates the groups; `start` brings them up. Calls return at once, except those that wait for an event."""

    def __init__(self, config: PhalanxConfig):
        set_up_logging("supervisor", config.serve.log_level, config.serve.log_format)
        self._config = self._present = config  # of the start, and after changes
        self._device = ""  # of the ranks
        self._groups = self._create_groups(config)
        self._leases = Leases(config.cluster.start_timeout_s)
        self._metrics = SnapshotTotals()
        self._launcher_seen: float | None = None
        self._drain_timeout_s = 0.0
        self._draining = asyncio.Event()
        self._drained: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def _create_groups(self, config: PhalanxConfig) -> list[Group]:
        """The groups of the configuration: one."""
        if config.model.revision is not None:  # this node may be another than that of the command
            hub.fetch_description(config.model.path, config.model.revision)
        rank_config = self._resolve(config)
        cluster, self._device = config.cluster, rank_config.device
        name = config.serve.app_name
        actor_id = ray.get_runtime_context().get_actor_id()  # of all processes of this supervisor
        launcher = RankLauncher(
            rank_config, name=f"{name}:{actor_id}", joined=cluster.ray_address is not None
        )
        group = Group(
            name,
            rank_config,
            launcher,
            start_timeout_s=cluster.start_timeout_s,
            hang_timeout_s=cluster.hang_timeout_s,
            rebuild_attempts=cluster.rebuild_attempts,
            standby_ranks=cluster.standby_ranks,
            shrink=cluster.shrink,
        )
        return [group]

    def _resolve(self, config: PhalanxConfig) -> RankConfig:
        # This actor holds no GPU and so sees none: Ray counts the GPUs of the cluster.
        return resolve_rank_config(config, num_gpus=num_gpus())

    async def start(self, config: PhalanxConfig) -> None:
        """Bring the groups up; the first call alone has an effect. Raises ValueError for another configuration."""
        if config != self._config:
            raise ValueError(
                f"application {config.serve.app_name!r} is already running with another configuration; "
                "stop it first, or give this one another serve.app_name"
            )
        self._leases.restart_wait()  # the caller is an ingress, or will start one
        if not self._tasks:
            self._run()

    async def recover(self, changed: PhalanxConfig | None = None) -> None:
        """Continue in place of an earlier process: its ranks serve, and its ingresses keep their streams.

        changed: the configuration after the changes in service; without ranks the start's configuration counts
        """
        wanted = None if changed is None else self._resolve(changed)
        for group in self._groups:
            for lease_id in await group.recover(wanted):
                self._leases.adopt(lease_id)
            if changed is not None and group.members.ranks:
                self._present = changed
        self._run()

    def _run(self) -> None:
        jobs = [*(group.run() for group in self._groups), self._watch_leases(), self._watch_nodes()]
        self._tasks = [asyncio.create_task(job) for job in jobs]

    async def status(self) -> list[GroupStatus]:
        """Every group with its progress, for people."""
        return [await group.refreshed_status() for group in self._groups]

    async def healths(self) -> list[GroupHealth]:
        """The health of every group."""
        return [group.health for group in self._groups]

    async def changed_healths(self, seen: list[GroupHealth]) -> list[GroupHealth]:
        """The health of every group, as soon as one differs from `seen`."""
        waits = [
            asyncio.ensure_future(group.changed(health))
            for group, health in zip(self._groups, seen, strict=True)
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return await self.healths()

    async def register(self, ingress_id: str) -> Registration:
        """Give an ingress a lease and the members of all groups."""
        members = [group.members for group in self._groups]
        return Registration(self._leases.open(ingress_id), members)

    async def heartbeat(self, ingress_id: str, lease_id: str, metrics: Snapshot) -> bool:
        """Whether the lease was valid; it is renewed then. An ingress without a lease must register again."""
        self._metrics.put(ingress_id, metrics)
        return self._leases.renew(lease_id)

    async def launcher_heartbeat(self) -> None:
        """Note that the `phalanx serve` of this server lives; a server of `serve run` has none."""
        self._launcher_seen = time.monotonic()

    async def unregister(self, lease_id: str) -> None:
        """An ingress has ended."""
        self._leases.close(lease_id)
        self._close_streams(lease_id)

    async def ingress_metrics(self, ingress_id: str, metrics: Snapshot) -> Snapshot:
        """The sum of the counts of all ingresses; `metrics` are the latest of the calling one."""
        self._metrics.put(ingress_id, metrics)
        return self._metrics.total()

    async def scale(self, num_ranks: int) -> None:
        """Bring the groups to another number of ranks; open requests go on. Raises ValueError if that is impossible."""
        config = await asyncio.to_thread(
            changed_config, self._present, [f"cluster.ranks={num_ranks}"], SCALE
        )
        await self._change(config, f"scaling to {num_ranks} ranks", anew=False)

    async def restart(self, settings: list[str]) -> None:
        """Replace the processes of all ranks, with these settings (as in --set); open requests go on."""
        config = await asyncio.to_thread(changed_config, self._present, settings, RESTART)
        what = f" with {', '.join(settings)}" if settings else ""
        await self._change(config, f"restarting the ranks{what}", anew=True)

    async def _change(self, config: PhalanxConfig, reason: str, *, anew: bool) -> None:
        check_num_ranks(config)
        ranks = self._resolve(config)
        if ranks.device != self._device:
            raise ValueError(f"the ranks would run on {ranks.device} instead of {self._device}")
        for group in self._groups:
            await group.change(ranks, reason, anew=anew)
        await self._keep(config)

    async def _keep(self, config: PhalanxConfig) -> None:
        """Note the configuration after a change."""
        self._present = config

    async def drain(self, timeout_s: float) -> None:
        """Let every ingress refuse new requests and finish its open ones within `timeout_s` seconds."""
        for group in self._groups:
            group.drain()
        self._drain_timeout_s = timeout_s
        self._draining.set()

    async def drain_requested(self) -> float:
        """Return the argument of `drain` once it has been called; ingresses wait here."""
        await self._draining.wait()
        return self._drain_timeout_s

    async def drained(self, ingress_id: str) -> None:
        """An ingress has finished its requests."""
        self._drained.add(ingress_id)

    async def is_drained(self) -> bool:
        """Whether every ingress has finished its requests."""
        return self._drained >= self._leases.ingress_ids

    async def excuse_failures(self) -> None:
        """An ingress has found that a request ended ranks."""
        for group in self._groups:
            group.excuse_failures()

    async def ping(self) -> None:
        """Return at once; a rank calls it from time to time, and ends when this actor has ended for good."""

    async def prepare(self) -> None:
        """Bring all ranks up to the point where an engine can start, for `trace`."""
        for group in self._groups:
            await group.prepare()

    async def trace(self, phase: str, num_tokens: int) -> list[RankTrace]:
        """Run a step of `num_tokens` tokens on every rank, whole and in ubatches; after `prepare`."""
        return [trace for group in self._groups for trace in await group.trace(phase, num_tokens)]

    async def stop(self) -> None:
        """Stop all groups and give back their resources."""
        await asyncio.gather(*(group.stop() for group in self._groups))

    async def exit(self) -> None:
        """Stop all groups and end this actor."""
        await self.stop()
        _kill_own_actor()

    async def _watch_leases(self) -> None:
        """Free what an expired ingress had open; end this actor when no ingress or no launcher is left."""
        while not self._leases.abandoned():
            await asyncio.sleep(LEASE_S / 10)
            seen = self._launcher_seen
            if seen is not None and time.monotonic() - seen > LAUNCHER_LEASE_S:
                logger.warning(
                    "phalanx serve was silent for %g s; its server ends", LAUNCHER_LEASE_S
                )
                await asyncio.to_thread(_delete_application, self._config.serve.app_name)
                break
            if any(group.health.state in ("starting", "rebuilding") for group in self._groups):
                self._leases.restart_wait()  # ingresses register with groups that serve
            for lease_id, ingress_id in self._leases.expire():
                logger.warning(
                    "%s sent no heartbeat for %g s; its streams end", ingress_id, LEASE_S
                )
                self._metrics.retire(ingress_id, GAUGES)
                self._close_streams(lease_id)
        logger.info("the server ends")
        await self.exit()

    async def _watch_nodes(self) -> None:
        """Let the groups leave nodes that Ray drains. Drain the server when a group has no other place."""
        while not self._draining.is_set():
            await asyncio.sleep(NODES_S)
            for group in self._groups:
                try:
                    left_s = await group.leave_draining_nodes()
                except Exception as error:  # Ray's GCS may start anew
                    logger.warning("Ray does not name the nodes that it drains: %s", error)
                    continue
                if left_s is not None:
                    logger.warning("Ray drains a node of the ranks, and no other node has room")
                    await self.drain(max(0.0, min(left_s, self._config.serve.drain_timeout_s)))

    def _close_streams(self, lease_id: str) -> None:
        for group in self._groups:
            if group.health.alive:
                group.close_stream(lease_id)


def _delete_application(name: str) -> None:
    """End the ingresses, so that Serve does not start them again."""
    from ray import serve

    try:
        serve.delete(name)
    except Exception as error:
        logger.warning("Serve cannot end application %s: %s", name, error)


class SupervisorActor(Supervisor):
    """The supervisor as a Ray actor, in its first process or a later one."""

    async def __init__(self, config: PhalanxConfig):  # type: ignore[misc]  # Ray awaits it
        super().__init__(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own code calls a deprecated method of its own
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._saved = SavedConfig(str(ray.get_runtime_context().get_actor_id()))
        if restarted:
            await self.recover(await self._saved.load())

    async def _keep(self, config: PhalanxConfig) -> None:
        await self._saved.save(config)
        await super()._keep(config)

    async def stop(self) -> None:
        """Stop all groups and give back their resources."""
        await super().stop()
        await self._saved.delete()


def _kill_own_actor() -> None:
    """End this process. `ray.actor.exit_actor` would wait for ever for calls that wait, such as `drain_requested`."""
    ray.kill(ray.get_runtime_context().current_actor)
