"""The supervisor: owns the model pool of one server and the leases of its ingresses.

It starts and watches the groups, and ends itself with them when no ingress is left, so that no process stays behind.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from functools import partial

import ray

from cluster.config.phalanx_config import PhalanxConfig, Role
from cluster.metrics.metrics import GAUGES
from cluster.metrics.snapshot import Snapshot, SnapshotTotals
from cluster.supervisor.adapters import ServerAdapters
from cluster.supervisor.group import Group
from cluster.supervisor.group_spec import GroupSpec, group_specs
from cluster.supervisor.launcher import RankLauncher, rank_launchers
from cluster.supervisor.leases import LEASE_S, Leases
from cluster.supervisor.operations import Operations, resolve_on_cluster
from cluster.supervisor.placement import num_gpus
from cluster.supervisor.pool import ModelPool
from cluster.supervisor.saved_state import PoolState
from cluster.supervisor.slow_ranks import SlowRanks
from cluster.supervisor.status import (
    GroupHealth,
    GroupStatus,
    Registration,
    Renewal,
)
from kernels.host.awake import AwakeTime
from kernels.host.owned import OwnedTask
from workers import hub
from workers.log import set_up_logging
from workers.lora_config import LoadedAdapter
from workers.rank.rank_info import RankTrace

logger = logging.getLogger(__name__)

NODES_S = 2.0
"""Interval between two looks for nodes that Ray drains."""
LAUNCHER_LEASE_S = 60.0
"""Time without a heartbeat of `phalanx serve` after which its server ends."""


class Supervisor:
    """Creates the groups; `start` brings them up. Calls return at once, except those that wait for an event."""

    def __init__(self, config: PhalanxConfig):
        set_up_logging("supervisor", config.serve.log_level, config.serve.log_format)
        self._config = config
        # While this process is stopped, or its loop waits for Ray's GCS, it reads no heartbeat: the silence is its own.
        self._awake = AwakeTime(LEASE_S / 5)
        self._leases = Leases(config.cluster.start_timeout_s, self._awake.look)
        self._pool = ModelPool(self._create_groups(config), self._leases.of_group)
        self._state = PoolState()
        self._operations = Operations(config, self._pool, self._state, self._save_state)
        self._adapters = ServerAdapters(
            config.lora,
            config.serve.model_name or "",
            self._pool.groups,
            ingresses=lambda: self._leases.ingress_ids,
            keep=self._save_state,
        )
        of_first = (it for group in self._pool.groups[:1] for it in group.spec.ranks.adapters)
        self._adapters.begin(of_first)
        self._state.adapters = self._adapters.state
        self._metrics = SnapshotTotals()
        self._refused: dict[bytes, float] = {}  # digests of requests, by the time of their report
        self._launcher_seen: float | None = None
        self._draining = asyncio.Event()
        self._awaited: set[str] = set()  # ingresses that may have no lease of this process yet
        self._tasks: list[OwnedTask] = []

    def _create_groups(self, config: PhalanxConfig) -> list[Group]:
        if config.model.revision is not None:  # this node may be another than that of the command
            hub.fetch_description(config.model.path, config.model.revision)
        # This actor holds no GPU and so sees none: Ray counts the GPUs of the cluster.
        specs = group_specs(config, num_gpus=num_gpus())
        actor_id = ray.get_runtime_context().get_actor_id()  # of all processes of this supervisor
        launchers = rank_launchers(
            {f"{spec.name}:{actor_id}": spec.ranks for spec in specs},
            joined=config.cluster.ray_address is not None,
        )
        return [
            self._create_group(config, spec, launcher)
            for spec, launcher in zip(specs, launchers, strict=True)
        ]

    def _create_group(
        self, config: PhalanxConfig, spec: GroupSpec, launcher: RankLauncher
    ) -> Group:
        cluster = config.cluster
        return Group(
            spec,
            launcher,
            start_timeout_s=cluster.start_timeout_s,
            hang_timeout_s=cluster.hang_timeout_s,
            rebuild_attempts=cluster.rebuild_attempts,
            standby_ranks=cluster.standby_ranks,
            shrink=cluster.shrink,
            slow_ranks=SlowRanks(cluster.slow_rank_factor, replace=cluster.replace_slow_rank),
            epoch_begins=partial(self._note_epoch, spec.name),
        )

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

    async def recover(self, state: PoolState) -> None:
        """Continue in place of an earlier process: its ranks serve, and its ingresses keep their streams.

        state: what that process has kept; without ranks the configuration of the start counts
        """
        self._state = self._operations.state = state
        if state.adapters is not None:
            self._adapters.recover(state.adapters)
        state.adapters = self._adapters.state
        for index, group in enumerate(self._pool.groups):
            kept = state.of(group.spec.name)
            if kept.role is not None:
                group.take_role(kept.role)
            wanted = None if kept.config is None else resolve_on_cluster(kept.config)
            for lease_id in await group.recover(wanted, kept.epoch):
                self._leases.adopt(lease_id, index)
            if not group.members.ranks:
                kept.config = None
        self._run()
        self._resume_drains()

    def _resume_drains(self) -> None:
        """Continue the drains that an earlier process has begun; their time begins anew."""
        self._awaited = self._state.ingresses
        for group in self._pool.groups:
            limit_s = self._state.of(group.spec.name).drain_s
            if limit_s is not None:
                self._pool.begin_drain(group, limit_s)
        if self._state.drain_s is not None:
            self._begin_drain()

    def _run(self) -> None:
        self._pool.run()
        self._tasks = [
            OwnedTask(self._watch_leases(), self._fail, "watch-leases", may_end=True),
            OwnedTask(self._watch_nodes(), self._fail, "watch-nodes", may_end=True),
        ]

    def _fail(self, error: BaseException) -> None:
        """Fail all groups, because a task of the supervisor has ended."""
        logger.error("the supervisor failed", exc_info=error)
        self._pool.fail(f"the supervisor failed: {type(error).__name__}: {error}")

    async def status(self) -> list[GroupStatus]:
        """Every group with its progress, for people."""
        return await self._pool.statuses()

    async def healths(self) -> list[GroupHealth]:
        """The health of every group."""
        return self._pool.healths

    async def changed_healths(self, seen: list[GroupHealth]) -> list[GroupHealth]:
        """The health of every group, as soon as one differs from `seen`."""
        await self._pool.changed(seen)
        return self._pool.healths

    async def register(self, ingress_id: str, group: int) -> Registration | None:
        """Give an ingress a lease of a group, and the members of the group; None while the group does not serve."""
        members = self._pool.members(group)
        if members is None:
            return None
        return Registration(self._leases.open(ingress_id, group), members)

    async def heartbeat(
        self, ingress_id: str, lease_ids: Sequence[str], metrics: Snapshot
    ) -> Renewal:
        """Renew the leases of an ingress."""
        self._metrics.put(ingress_id, metrics)
        expired = [lease_id for lease_id in lease_ids if not self._leases.renew(lease_id)]
        since = self._awake.look() - LEASE_S
        self._refused = {digest: at for digest, at in self._refused.items() if at > since}
        return Renewal(expired, list(self._refused))

    async def launcher_heartbeat(self) -> None:
        """Note that the `phalanx serve` of this server lives; a server of `serve run` has none."""
        self._launcher_seen = self._awake.look()

    async def unregister(self, lease_id: str) -> None:
        """An ingress needs a lease no longer."""
        self._end_lease(lease_id)

    async def ingress_metrics(self, ingress_id: str, metrics: Snapshot) -> Snapshot:
        """The sum of the counts of all ingresses; `metrics` are the latest of the calling one."""
        self._metrics.put(ingress_id, metrics)
        return self._metrics.total()

    async def load_adapter(self, name: str, path: str) -> LoadedAdapter:
        """Load a LoRA adapter into all ranks, or into none. Raises AdapterError."""
        return await self._adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Give an adapter no new requests, and drop it after the open ones. Raises UnknownAdapterError."""
        await self._adapters.unload(name)

    async def changed_adapters(
        self, seen: Sequence[LoadedAdapter] | None
    ) -> tuple[LoadedAdapter, ...]:
        """The adapters that take requests, as soon as they differ from `seen`; at once for None."""
        return self._adapters.listed if seen is None else await self._adapters.changed(seen)

    async def report_adapters(self, ingress_id: str, used: Collection[int]) -> None:
        """Note which adapters an ingress lists or has open requests for."""
        await self._adapters.report(ingress_id, used)

    async def scale(self, num_ranks: int, group: str | None = None) -> None:
        """Bring a group to another number of ranks; open requests go on. Raises ValueError if that is impossible."""
        await self._operations.scale(num_ranks, group)

    async def restart(self, settings: list[str], group: str | None = None) -> None:
        """Replace the processes of a group's ranks, with these settings (as in --set); open requests go on.

        Without a name all groups restart, one after another.
        """
        await self._operations.restart(settings, group)

    async def switch_role(self, role: Role, group: str | None = None) -> None:
        """Let a group have another part of requests; open ones go on. Raises ValueError if that is impossible."""
        await self._operations.switch_role(role, group)

    async def _note_epoch(self, group: str, epoch: int) -> None:
        """Keep the number of an epoch that begins: a supervisor that finds no rank goes on after it.

        An ingress with streams of an epoch would take a later epoch of the same number for it.
        """
        self._state.of(group).epoch = epoch
        await self._save_state()

    async def _save_state(self) -> None:
        """Keep the state for the next process, where this is an actor of Ray."""

    async def drain(self, timeout_s: float, group: str | None = None) -> None:
        """Let every ingress refuse new requests and finish its open ones within `timeout_s` seconds.

        group: drain this group alone, in favour of the other ones
        """
        if group is not None:
            self._pool.drain(self._pool.only(group), timeout_s)
            self._state.of(group).drain_s = timeout_s
        else:
            self._state.drain_s, self._state.ingresses = timeout_s, self._leases.ingress_ids
            self._begin_drain()
        await self._save_state()

    def _begin_drain(self) -> None:
        for group in self._pool.groups:
            group.drain()
        self._draining.set()

    async def drain_requested(self) -> float:
        """Return the argument of `drain` once it has been called; ingresses wait here."""
        await self._draining.wait()
        assert self._state.drain_s is not None
        return self._state.drain_s

    async def drained(self, ingress_id: str) -> None:
        """An ingress has finished its requests."""
        self._state.drained.add(ingress_id)
        await self._save_state()

    async def is_drained(self) -> bool:
        """Whether every ingress has finished its requests."""
        return self._state.drained >= self._leases.ingress_ids | self._awaited

    async def refuse(self, digest: bytes) -> None:
        """Let every ingress refuse the requests of a digest, which has ended ranks."""
        self._refused[digest] = self._awake.look()

    async def expect_failures(self, group: int, epoch: int, ranks: Collection[int]) -> None:
        """An ingress puts requests on trial in these ranks, and will judge their next failure."""
        self._pool.groups[group].attempts.expect(epoch, ranks)

    async def judge_failure(self, group: int, by_request: bool) -> None:
        """An ingress has found whether one of its requests ended ranks of a group."""
        self._pool.groups[group].attempts.judge(by_request)

    async def ping(self) -> None:
        """Return at once; a rank calls it from time to time, and ends when this actor has ended for good."""

    async def prepare(self) -> None:
        """Bring all ranks up to the point where an engine can start, for `trace`."""
        for group in self._pool.groups:
            await group.prepare()

    async def trace(self, phase: str, num_tokens: int) -> list[RankTrace]:
        """Run a step of `num_tokens` tokens on every rank, whole and in ubatches; after `prepare`."""
        return [
            trace for group in self._pool.groups for trace in await group.trace(phase, num_tokens)
        ]

    async def stop(self) -> None:
        """Stop all groups and give back their resources."""
        await self._pool.stop()
        self._adapters.end()

    async def exit(self) -> None:
        """Stop all groups and end this actor, also if Ray's GCS fails meanwhile."""
        try:
            await self.stop()
        finally:
            _kill_own_actor()

    async def _watch_leases(self) -> None:
        """Free what an expired ingress had open; end this actor when no ingress or no launcher is left."""
        while not self._leases.abandoned():
            await asyncio.sleep(LEASE_S / 10)
            awake_s, seen = self._awake.look(), self._launcher_seen
            if seen is not None and awake_s - seen > LAUNCHER_LEASE_S:
                logger.warning(
                    "phalanx serve was silent for %g s; its server ends", LAUNCHER_LEASE_S
                )
                await asyncio.to_thread(_delete_application, self._config.serve.app_name)
                break
            if self._pool.going_up:
                self._leases.restart_wait()  # ingresses register with groups that serve
            for lease_id, ingress_id in self._leases.expired():
                logger.warning(
                    "%s sent no heartbeat for %g s; its streams end", ingress_id, LEASE_S
                )
                self._metrics.retire(ingress_id, GAUGES)
                self._end_lease(lease_id)
            await self._adapters.drop_unused()
        logger.info("the server ends")
        await self.exit()

    async def _watch_nodes(self) -> None:
        """Let the groups leave nodes that Ray drains. A group that has no other place drains."""
        while not self._draining.is_set():
            await asyncio.sleep(NODES_S)
            for group in self._pool.groups:
                try:
                    left_s = await group.leave_draining_nodes()
                except Exception as error:  # Ray's GCS may start anew
                    logger.warning("Ray does not name the nodes that it drains: %s", error)
                    continue
                if left_s is not None:
                    logger.warning("Ray drains a node of the ranks, and no other node has room")
                    limit_s = max(0.0, min(left_s, self._config.serve.drain_timeout_s))
                    spared = group.spec.name if self._pool.can_spare(group) else None
                    await self.drain(limit_s, spared)

    def _end_lease(self, lease_id: str) -> None:
        """Close the streams of a lease, unless it has ended before."""
        group = self._leases.close(lease_id)
        if group is not None:
            self._pool.close_stream(group, lease_id)


def _delete_application(name: str) -> None:
    """End the ingresses, so that Serve does not start them again."""
    from ray import serve

    try:
        serve.delete(name)
    except Exception as error:
        logger.warning("Serve cannot end application %s: %s", name, error)


def _kill_own_actor() -> None:
    """End this process. `ray.actor.exit_actor` would wait for ever for calls that wait, such as `drain_requested`."""
    ray.kill(ray.get_runtime_context().current_actor)
