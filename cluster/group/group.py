"""One group: the ranks that share a process group, with their epoch and state.

A Group brings its ranks up stage by stage, rebuilds itself as a new epoch when a rank ends, and takes the ranks down.
Knows nothing of ingresses beyond the names of their streams, and nothing of HTTP.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from cluster.errors import SHUTDOWN_REASON
from cluster.group import placement
from cluster.group.checkpoint_nodes import fetch_checkpoint
from cluster.group.failures import (
    RankDiedError,
    failure_message,
    first_failure,
    gather_ranks,
    of_rank,
    step_failed,
)
from cluster.group.launcher import Launcher, RankHandle
from cluster.group.ray_calls import result, result_future
from cluster.group.recovery import find_memberships, recover
from workers.config import RankConfig
from workers.engine.step_sync import compare_settings
from workers.rank.rank_info import CHECKPOINT, RankInfo, Rendezvous, start_stages, total_progress
from workers.trace.spans import RankTrace
from workers.wire.secure_socket import StreamAddress

logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP_TIMEOUT_S = 3.0
STABLE_S = 5.0
"""Seconds of service after which a failure is not counted as a result of the rebuild before."""

GroupState = Literal["starting", "serving", "rebuilding", "draining", "failed", "stopped"]


class StageTimeoutError(ValueError):
    """A stage of the start took longer than the configuration allows."""


class GroupHealth(NamedTuple):
    """The state of a group; `error` explains the states failed and stopped."""

    state: GroupState
    epoch: int
    error: str

    @property
    def alive(self) -> bool:
        """Whether the ranks compute: requests in flight go on."""
        return self.state in ("serving", "draining")

    @property
    def ended(self) -> bool:
        """Whether the group will not serve again."""
        return self.state in ("failed", "stopped")


@dataclass
class GroupStatus:
    """A group and the progress of its start or rebuild, as shown to people.

    stages     name and seconds of each stage that ended
    progress   done and total of the present stage; (0, 0) if unknown
    """

    state: GroupState = "starting"
    epoch: int = 0
    error: str = ""
    stage: str = "placement"
    stages: list[tuple[str, float]] = field(default_factory=list)
    progress: tuple[int, int] = (0, 0)
    infos: list[RankInfo] = field(default_factory=list)
    locations: list[placement.RankLocation] = field(default_factory=list)


@dataclass(frozen=True)
class GroupMembers:
    """What an ingress needs to reach the ranks of one epoch, in rank order.

    failed: the ranks that ended the epoch before, by an error of their step or as a process that had to be replaced
    """

    epoch: int
    ranks: list[RankHandle]
    infos: list[RankInfo]
    failed: frozenset[int] = frozenset()


class Group:
    """The ranks of one process group. All methods run in the event loop of the supervisor.

    name: unique among the groups of the Ray cluster.
    hang_timeout_s: time for a rank to leave a failed epoch; a rank that takes longer gets a new process.
    rebuild_attempts: rebuilds in a row that may fail, or serve for less than STABLE_S; 0 = a failed rank ends the
        group.
    """

    def __init__(
        self,
        name: str,
        config: RankConfig,
        launcher: Launcher,
        *,
        start_timeout_s: float,
        hang_timeout_s: float = 5.0,
        rebuild_attempts: int = 0,
    ):
        self.status = GroupStatus()
        self._name = name
        self._config = config
        self._launcher = launcher
        self._start_timeout_s = start_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._rebuild_attempts = rebuild_attempts
        self._num_failures = 0  # in a row
        self._failed: set[int] = set()
        self._serving_since = 0.0
        self._draining = False
        self._ranks: list[RankHandle] = []
        self._inboxes: list[StreamAddress] = []
        self._changed = asyncio.Event()

    @property
    def health(self) -> GroupHealth:
        """State, epoch and error."""
        return GroupHealth(self.status.state, self.status.epoch, self.status.error)

    @property
    def members(self) -> GroupMembers:
        """The ranks of this epoch."""
        return GroupMembers(
            self.status.epoch, self._ranks, self.status.infos, frozenset(self._failed)
        )

    async def refreshed_status(self) -> GroupStatus:
        """The status, with the progress that the ranks report now."""
        status = self.status
        stages = (CHECKPOINT, *start_stages(self._config.device))
        if status.state == "starting" and status.stage in stages:
            calls = [rank.progress.remote() for rank in self._ranks]
            parts = await asyncio.gather(*map(result, calls), return_exceptions=True)
            status.progress = total_progress(
                status.stage, [part for part in parts if not isinstance(part, BaseException)]
            )
        return status

    async def recover(self) -> frozenset[str]:
        """Take over the ranks that an earlier process of the supervisor has left; `run` comes next.

        Ranks that serve go on, otherwise `run` rebuilds the group. Returns the streams that ingresses have open.
        """
        actors = self._launcher.find()
        if not actors:
            return frozenset()
        memberships = await find_memberships(actors, self._hang_timeout_s)
        found = recover(memberships, self._config.num_ranks)
        self._ranks = self._launcher.adopt(found.seats)
        self.status.epoch, self.status.infos = found.epoch, found.infos
        if found.reason:
            self._set_state("rebuilding", found.reason)
        else:
            await self._locate()
            self._serving_since = time.monotonic()
            self._set_state("serving")
        logger.warning("found %d ranks again after a restart of the supervisor", len(found.seats))
        return found.streams

    async def run(self) -> None:
        """Start the group and keep it serving, over any number of epochs, until it is stopped or fails."""
        if self.health.state == "starting":
            await self.start()
        if self.health.state == "rebuilding":
            await self._rebuild(self.health.error)
        while self.health.alive:
            failure = await self.watch()
            if failure is not None:
                await self._rebuild(failure)

    async def start(self) -> None:
        """Bring the ranks up until they serve. On an error the state is failed; after a death it may be rebuilding."""
        try:
            await self.prepare()
            await self._start_engines()
        except Exception as error:
            if self.status.state == "stopped":
                return  # stop() killed the ranks
            # The console shows the message of a user's mistake; a traceback would hide it.
            explained = isinstance(error, ValueError | RankDiedError)
            level = logging.DEBUG if explained else logging.ERROR
            logger.log(level, "start failed at stage %s", self.status.stage, exc_info=True)
            message = f"start failed at stage {self.status.stage!r}: {failure_message(error)}"
            if isinstance(error, RankDiedError) and self._rebuild_attempts:
                self._set_state("rebuilding", message)
            else:
                self._end("failed", message)

    async def prepare(self) -> None:
        """Bring the ranks up to the point where an engine can start."""
        launched = self._launcher.launch(self._start_timeout_s)
        self._ranks = await self._stage("placement", launched)
        await self._form()

    async def _form(self) -> None:
        """Let the processes form the group of the present epoch, up to the point where an engine can start."""
        status, timeout_s = self.status, self._start_timeout_s
        await self._stage("processes", self._locate())
        if self._config.model.revision is not None or self._config.fetch_weights:
            fetched = fetch_checkpoint(self._config, self._ranks, status.locations)
            await self._stage(CHECKPOINT, fetched, limited=False)
        host, port = await of_rank(0, self._ranks[0].host_rendezvous.remote())
        name = f"{self._name}-{os.getpid()}-{status.epoch}"
        rendezvous = Rendezvous(host, port, name, status.epoch)
        joined = [
            rank.join_group.remote(
                rendezvous,
                timeout_s,
                placement.visible_gpus(status.locations, index),
                index,
                self._config,
            )
            for index, rank in enumerate(self._ranks)
        ]
        await self._stage("group", gather_ranks(joined))
        for stage in start_stages(self._config.device):
            await self._stage(stage, self._call_all("run_stage", stage))

    async def trace(self, phase: str, num_tokens: int) -> list[RankTrace]:
        """Run a step of `num_tokens` tokens on every rank, whole and in ubatches; after `prepare`."""
        return await self._stage("trace", self._call_all("trace", phase, num_tokens))

    async def watch(self) -> str | None:
        """Return when a rank has ended, because a group with a missing rank cannot take another step.

        Returns the reason, or None if the group was stopped.
        """
        epoch = self.status.epoch
        done = [result_future(rank.done.remote(epoch)) for rank in self._ranks]
        ended = await first_failure(done)
        if not self.health.alive:
            return None
        error, rank = ended.exception(), done.index(ended)
        self._failed = {rank} if error is not None and step_failed(error) else set()
        reason = failure_message(error) if error is not None else "left its loop"
        return f"rank {rank}: {reason}"

    async def _rebuild(self, reason: str) -> None:
        """Bring the ranks into a new epoch, until they serve or no attempt is left.

        Living processes keep their weights, kernels and KV memory; a process that cannot leave the old epoch is
        replaced. The ranks of the new epoch refuse messages of the old one, and the other way round.
        """
        began, first_attempt = time.monotonic(), True
        if began - self._serving_since >= STABLE_S:
            self._num_failures = 0
        while self._num_failures < self._rebuild_attempts:
            self._num_failures += 1
            self.status.epoch += 1
            self.status.stages = []
            self._set_state("rebuilding", reason)
            logger.warning("rebuilding as epoch %d: %s", self.status.epoch, reason)
            try:
                replaced = await self._stage("replacement", self._replace_failed())
                if first_attempt:
                    self._failed |= set(replaced)
                    first_attempt = False
                await self._form()
                await self._start_engines()
            except Exception as error:
                if self.health.ended:
                    return  # stop() killed the ranks
                logger.debug("rebuild failed at stage %s", self.status.stage, exc_info=True)
                reason += (
                    f"; rebuild failed at stage {self.status.stage!r}: {failure_message(error)}"
                )
            else:
                logger.warning(
                    "serving again after %.1f s, as epoch %d",
                    time.monotonic() - began,
                    self.status.epoch,
                )
                return
        if self._rebuild_attempts:
            reason += f" (after {self._num_failures} rebuilds in a row, cluster.rebuild_attempts)"
        self._end("failed", reason)

    async def _replace_failed(self) -> list[int]:
        """Let every rank leave its epoch, and replace the processes of the ranks that do not; return those ranks."""
        left = await asyncio.gather(*map(self._leave, range(len(self._ranks))))
        failed = [rank for rank, has_left in enumerate(left) if not has_left]
        self._ranks = await self._launcher.replace(failed)
        return failed

    async def _leave(self, rank: int) -> bool:
        call = self._ranks[rank].leave_epoch.remote(self.status.epoch)
        try:
            await asyncio.wait_for(result(call), self._hang_timeout_s)
        except TimeoutError:
            logger.warning(
                "rank %d did not leave its epoch within %g s (cluster.hang_timeout_s); it gets a new process",
                rank,
                self._hang_timeout_s,
            )
            return False
        except Exception as error:
            logger.warning("rank %d gets a new process: %s", rank, failure_message(error))
            return False
        return True

    def close_stream(self, stream_id: str) -> None:
        """Let every rank forget the requests and the stream of an ingress that is gone."""
        for rank in self._ranks:
            rank.close_stream.remote(self.status.epoch, stream_id)

    def note_poison(self) -> None:
        """Note that the failures so far had a cause, which is gone: they do not count towards `rebuild_attempts`."""
        self._num_failures = 0

    def drain(self) -> None:
        """Note that no new requests come."""
        self._draining = True
        if self.status.state == "serving":
            self._set_state("draining")

    async def stop(self) -> None:
        """Stop the ranks and give back their resources."""
        was_alive, epoch = self.health.alive, self.status.epoch
        self._set_state("stopped", SHUTDOWN_REASON)  # before a rank ends, which is no failure now
        if was_alive:
            done = [rank.done.remote(epoch) for rank in self._ranks]
            self._ranks[0].stop.remote(epoch)
            try:
                ended = asyncio.gather(*map(result, done), return_exceptions=True)
                await asyncio.wait_for(ended, STOP_TIMEOUT_S)
            except TimeoutError:
                logger.warning("ranks did not stop within %g s and are killed", STOP_TIMEOUT_S)
        self._launcher.kill()

    async def changed(self, seen: GroupHealth) -> None:
        """Return as soon as the health differs from `seen`."""
        while self.health == seen:
            await self._changed.wait()

    async def _start_engines(self) -> None:
        epoch, inboxes = self.status.epoch, self._inboxes
        started = [
            rank.start.remote(epoch, self._config.dims.of_peers(index, inboxes))
            for index, rank in enumerate(self._ranks)
        ]
        self.status.infos = await self._stage("engines", gather_ranks(started))
        if self.health.ended:
            return  # stop() came while the last rank answered
        self._serving_since = time.monotonic()
        self._set_state("draining" if self._draining else "serving")

    async def _locate(self) -> None:
        described = await self._call_all("describe")
        self._inboxes = [facts["inbox"] for facts in described]
        self.status.locations = [
            placement.RankLocation(
                rank, facts["node_id"], facts["address"], facts["pid"], tuple(facts["gpu_ids"])
            )
            for rank, facts in enumerate(described)
        ]
        placement.verify(self.status.locations, self._config)
        compare_settings([facts["versions"] for facts in described], "versions")

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Call `method` on every rank at once. The first failure is raised at once."""
        return await gather_ranks([getattr(rank, method).remote(*args) for rank in self._ranks])

    async def _stage(self, name: str, work: Awaitable[T], *, limited: bool = True) -> T:
        """Run a stage of the start; limited: within the time of the configuration."""
        self.status.stage, self.status.progress = name, (0, 0)
        started = time.monotonic()
        try:
            outcome = await asyncio.wait_for(work, self._start_timeout_s if limited else None)
        except TimeoutError as error:
            raise StageTimeoutError(
                f"not done after {self._start_timeout_s:g} s; cluster.start_timeout_s allows more"
            ) from error
        self.status.stages.append((name, time.monotonic() - started))
        return outcome

    def _end(self, state: GroupState, error: str) -> None:
        self._set_state(state, error)
        self._launcher.kill()

    def _set_state(self, state: GroupState, error: str = "") -> None:
        self.status.state, self.status.error = state, error
        self._changed.set()
        self._changed = asyncio.Event()
