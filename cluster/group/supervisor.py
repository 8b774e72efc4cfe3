"""The supervisor: a detached actor that owns the placement group and the ranks of one served model.

It brings the ranks up stage by stage, notices when one ends, and shares the fate of the ingress replicas: when
none has reported for a while it takes the ranks down and exits, so that nothing is left behind.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.exceptions import ActorDiedError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from cluster.config.phalanx_config import PhalanxConfig, resolve_rank_config
from cluster.group import placement
from cluster.metrics.metrics import GAUGES
from cluster.metrics.snapshot import Snapshot, SnapshotTotals
from kernels.host.cuda_environment import MULTICAST_OFF
from workers.rank.actor import PeerFailedError, RankActor, RankFailedError
from workers.rank.rank_info import RankInfo, Rendezvous, start_stages, total_progress
from workers.stats.log import set_up_logging
from workers.trace.spans import RankTrace
from workers.wire.secure_socket import StreamAddress

logger = logging.getLogger(__name__)

NAMESPACE = "phalanx"
LEASE_S = 30.0
STOPPING = "the server is stopping"
CULPRIT_S = 2.0  # Ray tells of a process that died within a second
# What vendors' libraries read reaches the ranks on every node, as it would in a plain process.
FORWARDED_ENVIRONMENT = (
    *("NCCL_", "NVSHMEM_", "TORCH_", "GLOO_", "OMP_", "MKL_", "CUDA_", "HF_"),
    *("TRITON_", "FLASHINFER_", "DG_", "EP_", "XDG_CACHE_HOME"),
)
NOT_FORWARDED = frozenset({"CUDA_VISIBLE_DEVICES"})  # Ray sets it for each actor

State = Literal["starting", "ready", "failed", "stopped"]


class StageTimeoutError(ValueError):
    """A stage of the start took longer than the configuration allows."""


@dataclass
class GroupStatus:
    """What the supervisor tells anybody who asks."""

    state: State = "starting"
    epoch: int = 0
    stage: str = "placement"
    stages: list[tuple[str, float]] = field(default_factory=list)
    progress: tuple[int, int] = (0, 0)
    error: str = ""
    infos: list[RankInfo] = field(default_factory=list)
    locations: list[placement.RankLocation] = field(default_factory=list)


def supervisor_name(config: PhalanxConfig) -> str:
    """The actor's name in NAMESPACE; one for each Serve application."""
    return f"supervisor:{config.serve.app_name}"


def get_or_create(config: PhalanxConfig) -> "ray.actor.ActorHandle":
    """The supervisor of this configuration, started if it is not there."""
    return (
        ray.remote(Supervisor)
        .options(
            name=supervisor_name(config),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=1000,
        )
        .remote(config)
    )


class Supervisor:
    """Brings the ranks up when constructed; everything is asynchronous, ask `status`."""

    def __init__(self, config: PhalanxConfig):
        set_up_logging("supervisor", config.serve.log_level, config.serve.log_format)
        self._config = config
        # This actor holds no GPU and so sees none: Ray knows what the cluster has.
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        self._rank_config = resolve_rank_config(config, num_gpus=num_gpus)
        self._status = GroupStatus()
        self._placement_group: PlacementGroup | None = None
        self._ranks: list[ray.actor.ActorHandle] = []
        self._inboxes: list[StreamAddress] = []
        self._leases: dict[str, float] = {}
        self._metrics = SnapshotTotals()
        self._drain_timeout_s = 0.0
        self._draining = asyncio.Event()
        self._drained: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    async def start(self, config: PhalanxConfig) -> None:
        """Begin, once. Raises ValueError when this supervisor runs another configuration."""
        if config != self._config:
            raise ValueError(
                f"application {config.serve.app_name!r} is already running with another configuration; "
                "stop it first, or give this one another serve.app_name"
            )
        if self._task is None:
            self._task = asyncio.create_task(self._live())

    async def status(self) -> GroupStatus:
        """Where the group is."""
        stage = self._status.stage
        if self._status.state == "starting" and stage in start_stages(self._rank_config.device):
            parts = await asyncio.gather(
                *(rank.progress.remote() for rank in self._ranks), return_exceptions=True
            )
            known = [part for part in parts if isinstance(part, tuple)]
            self._status.progress = total_progress(stage, known)
        return self._status

    async def ranks(self) -> list["ray.actor.ActorHandle"]:
        """Handles of the ranks, in rank order."""
        return self._ranks

    async def heartbeat(self, ingress_id: str, metrics: Snapshot) -> tuple[State, str]:
        """An ingress is alive and has counted `metrics`; it learns the group's state, and what went wrong if it did."""
        self._leases[ingress_id] = time.monotonic()
        self._metrics.put(ingress_id, metrics)
        return self._status.state, self._status.error

    async def ingress_metrics(self, ingress_id: str, metrics: Snapshot) -> Snapshot:
        """What all ingresses have counted; `metrics` is the latest of the one that asks."""
        self._metrics.put(ingress_id, metrics)
        return self._metrics.total()

    async def drain(self, timeout_s: float) -> None:
        """Tell every ingress to finish what it has within so many seconds, and to take nothing new."""
        self._drain_timeout_s = timeout_s
        self._draining.set()

    async def drain_asked(self) -> float:
        """Returns, with drain's argument, when that has been called; an ingress waits here."""
        await self._draining.wait()
        return self._drain_timeout_s

    async def drained(self, ingress_id: str) -> None:
        """An ingress has finished."""
        self._drained.add(ingress_id)

    async def is_drained(self) -> bool:
        """Whether every ingress has finished."""
        return self._drained >= self._leases.keys()

    async def stop(self) -> None:
        """Stop the ranks and give back everything they hold."""
        were_ready = self._status.state == "ready"
        # First, since whoever sees a rank end asks why.
        self._status.state, self._status.error = "stopped", STOPPING
        if were_ready:
            done = [rank.done.remote() for rank in self._ranks]
            self._ranks[0].stop.remote()
            try:
                await asyncio.wait_for(asyncio.gather(*done, return_exceptions=True), timeout=3)
            except TimeoutError:
                logger.warning("ranks did not stop within 3 s and are killed")
        self._release("stopped", STOPPING)

    async def _live(self) -> None:
        try:
            await self._bring_up()
        except Exception as error:
            if self._status.state == "stopped":
                return  # the ranks went away because they were told to
            # A user's mistake is told by its message alone, which the console shows anyway.
            level = logging.DEBUG if isinstance(error, ValueError) else logging.ERROR
            logger.log(level, "start failed at stage %s", self._status.stage, exc_info=True)
            self._release("failed", f"start failed at stage {self._status.stage!r}: {why(error)}")
            return
        watchers = [
            asyncio.create_task(self._watch_ranks()),
            asyncio.create_task(self._watch_leases()),
        ]
        await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)

    async def prepare(self) -> None:
        """Bring the ranks up to where their engines can be made."""
        config, timeout_s = self._rank_config, self._config.cluster.start_timeout_s
        await self._stage("placement", self._place(timeout_s))
        await self._stage("processes", self._locate())
        host, port = await self._ranks[0].host_rendezvous.remote()
        name = f"{self._config.serve.app_name}-{os.getpid()}-{self._status.epoch}"
        rendezvous = Rendezvous(host, port, name, self._status.epoch)
        locations = self._status.locations
        joined = [
            rank.join_group.remote(rendezvous, timeout_s, placement.visible_gpus(locations, index))
            for index, rank in enumerate(self._ranks)
        ]
        await self._stage("group", _gather(joined))
        for stage in start_stages(config.device):
            await self._stage(stage, self._all("run_stage", stage))

    async def trace(self, phase: str, num_tokens: int) -> list[RankTrace]:
        """A step of so many tokens on every rank, whole and in slices; after `prepare`."""
        return await self._stage("trace", self._all("trace", phase, num_tokens))

    async def _bring_up(self) -> None:
        await self.prepare()
        config = self._rank_config
        inboxes = self._inboxes
        started = [
            rank.start.remote(config.dims.of_peers(index, inboxes))
            for index, rank in enumerate(self._ranks)
        ]
        self._status.infos = await self._stage("engines", _gather(started))
        assert len(self._status.infos) == config.num_ranks
        self._status.state = "ready"

    async def _stage(self, name: str, work: Awaitable[Any]) -> Any:
        self._status.stage, self._status.progress = name, (0, 0)
        started = time.monotonic()
        timeout_s = self._config.cluster.start_timeout_s
        try:
            result = await asyncio.wait_for(work, timeout_s)
        except TimeoutError as error:
            raise StageTimeoutError(
                f"not done after {timeout_s:g} s; cluster.start_timeout_s allows more"
            ) from error
        self._status.stages.append((name, time.monotonic() - started))
        return result

    async def _place(self, timeout_s: float) -> None:
        config = self._rank_config
        if self._config.cluster.ray_address is None:
            placement.check_gpus(config, ray.nodes())
        self._placement_group = group = placement.create(config)
        wait_s = min(timeout_s, 60.0)
        ready = await asyncio.to_thread(group.wait, wait_s)
        placement.check_ready(ready, config, wait_s)
        actor_class = ray.remote(RankActor)
        environment = self._environment()
        extra = {"runtime_env": {"env_vars": environment}} if environment else {}
        self._ranks = [
            actor_class.options(**placement.actor_options(config, group, rank), **extra).remote(
                rank, config
            )
            for rank in config.dims.ranks()
        ]

    def _environment(self) -> dict[str, str]:
        """Variables of the ranks' processes. A local Ray inherits ours; on a cluster they have to be carried along.

        Ray starts a new process for ranks that need any, where others wait already.
        """
        joined = self._config.cluster.ray_address is not None
        forwarded = _forwarded_environment() if joined else {}
        if self._rank_config.device != "cuda":
            return forwarded
        inherited = os.environ if len(ray.nodes()) == 1 else {}
        needed = {k: v for k, v in MULTICAST_OFF.items() if inherited.get(k) != v}
        return forwarded | needed

    async def _locate(self) -> None:
        described = await self._all("describe")
        self._inboxes = [facts["inbox"] for facts in described]
        self._status.locations = [
            placement.RankLocation(
                rank, facts["node_id"], facts["host"], facts["pid"], tuple(facts["gpu_ids"])
            )
            for rank, facts in enumerate(described)
        ]
        placement.verify(self._status.locations, self._rank_config)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """Call `method` on every rank at once; the first failure is raised at once."""
        return await _gather([getattr(rank, method).remote(*args) for rank in self._ranks])

    async def _watch_ranks(self) -> None:
        """Ends when a rank ends: a group with a missing rank cannot take another step."""
        done = [asyncio.ensure_future(_wait(rank.done.remote())) for rank in self._ranks]
        for task in done:  # the others end with an error too, once killed; unread, asyncio logs it
            task.add_done_callback(_read_error)
        ended = await _first_to_end(done)
        if self._status.state == "ready":
            error = ended.exception()
            reason = why(error) if error is not None else "left its loop"
            self._release("failed", f"rank {done.index(ended)}: {reason}")

    async def _watch_leases(self) -> None:
        """Frees what a vanished ingress had open; ends the whole group when the last one is gone."""
        started = time.monotonic()
        while self._status.state == "ready":
            await asyncio.sleep(LEASE_S / 10)
            now = time.monotonic()
            for ingress_id in [k for k, seen in self._leases.items() if now - seen > LEASE_S]:
                del self._leases[ingress_id]
                self._metrics.retire(ingress_id, GAUGES)
                for rank in self._ranks:
                    rank.close_ingress.remote(ingress_id)
            if not self._leases and now - started > self._config.cluster.start_timeout_s:
                self._release("stopped", "no ingress is left")
                ray.actor.exit_actor()

    def _release(self, state: State, error: str) -> None:
        self._status.state, self._status.error = state, error
        for rank in self._ranks:
            ray.kill(rank)
        if self._placement_group is not None:
            remove_placement_group(self._placement_group)
            self._placement_group = None


async def _wait(ref: "ray.ObjectRef") -> Any:
    return await ref


async def _first_to_end(done: list[asyncio.Task]) -> asyncio.Task:
    """Of the ranks' ends the first; but one that only noticed another's end gives that CULPRIT_S to be told."""
    noticed: list[asyncio.Task] = []
    waiting = set(done)
    while waiting:
        ended, waiting = await asyncio.wait(
            waiting,
            timeout=CULPRIT_S if noticed else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not ended:
            break
        for task in ended:
            if not isinstance(_cause(task.exception()), PeerFailedError):
                return task
            noticed.append(task)
    return noticed[0]


def _read_error(task: asyncio.Task) -> None:
    if not task.cancelled():
        task.exception()


async def _gather(refs: list["ray.ObjectRef"]) -> list[Any]:
    return await asyncio.gather(*(_wait(ref) for ref in refs))


def why(error: BaseException) -> str:
    """What happened, without the remote traceback that Ray puts around it; the log has that."""
    error = _cause(error)
    if isinstance(error, ActorDiedError):
        # Of what was raised in the actor's constructor only the text comes; its last line says what.
        return str(error).splitlines()[-1] if error.actor_init_failed else "its process died"
    told = isinstance(error, ValueError | RankFailedError)
    return str(error) if told else f"{type(error).__name__}: {error}"


def _cause(error: BaseException | None) -> BaseException | None:
    """What was raised remotely."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error


def _forwarded_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED_ENVIRONMENT) and name not in NOT_FORWARDED
    }
