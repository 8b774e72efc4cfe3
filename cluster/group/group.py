"""One group: the ranks that share a process group, with their epoch and state.

A Group brings its ranks up stage by stage, rebuilds itself as a new epoch when a rank ends, and takes the ranks down.
Knows nothing of ingresses beyond the names of their streams, and nothing of HTTP.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from cluster.errors import SHUTDOWN_REASON
from cluster.group import placement
from cluster.group.checkpoint_nodes import fetch_checkpoint
from cluster.group.failures import (
    RankDiedError,
    StageTimeoutError,
    failure_message,
    first_failure,
    gather_ranks,
    of_rank,
    step_failed,
)
from cluster.group.heartbeat import Hang, Heartbeats, HungRankError
from cluster.group.launcher import Launcher, RankHandle
from cluster.group.ray_calls import result, result_future
from cluster.group.recovery import find_memberships, recover
from cluster.group.status import GroupHealth, GroupMembers, GroupState, GroupStatus, Rebuild
from workers.config import RankConfig
from workers.engine.step_sync import compare_settings
from workers.rank.rank_info import CHECKPOINT, Rendezvous, start_stages, total_progress
from workers.trace.spans import RankTrace
from workers.wire.secure_socket import StreamAddress

logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP_TIMEOUT_S = 3.0
PROGRESS_TIMEOUT_S = 0.5
STABLE_S = 5.0
"""Seconds of service after which a failure is not counted as a result of the rebuild before."""


class Group:
    """The ranks of one process group. All methods run in the event loop of the supervisor.

    name: unique among the groups of the Ray cluster.
    hang_timeout_s: time without a sign of life after which a rank hangs, and time for a rank to leave a failed epoch;
        a rank that takes longer gets a new process.
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
        self._heartbeats = self._new_heartbeats()
        self._hang: Hang | None = None
        self._kept: set[int] = set()  # ranks with processes that the last rebuild has kept
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
        status.vote_ages = self._heartbeats.vote_ages() if self.health.alive else []
        stages = (CHECKPOINT, *start_stages(self._config.device))
        if status.state in ("starting", "rebuilding") and status.stage in stages:
            calls = [result_future(rank.progress.remote()) for rank in self._ranks]
            done, _ = await asyncio.wait(calls, timeout=PROGRESS_TIMEOUT_S)
            parts = [call.result() for call in done if call.exception() is None]
            status.progress = total_progress(status.stage, parts)
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
        await self._stage("processes", self._locate(), guarded=True)
        if self._config.model.revision is not None or self._config.fetch_weights:
            fetched = fetch_checkpoint(self._config, self._ranks, self.status.locations)
            await self._stage(CHECKPOINT, fetched, limited=False)
        await self._stage("group", self._join(), guarded=True)
        for stage in start_stages(self._config.device):
            await self._stage(stage, self._call_all("run_stage", stage), guarded=True)

    async def _join(self) -> None:
        """Let the ranks join the process group of the present epoch."""
        status = self.status
        host, port = await of_rank(0, self._ranks[0].host_rendezvous.remote())
        name = f"{self._name}-{os.getpid()}-{status.epoch}"
        rendezvous = Rendezvous(host, port, name, status.epoch)
        await gather_ranks(
            rank.join_group.remote(
                rendezvous,
                self._start_timeout_s,
                placement.visible_gpus(status.locations, index),
                index,
                self._config,
            )
            for index, rank in enumerate(self._ranks)
        )

    async def trace(self, phase: str, num_tokens: int) -> list[RankTrace]:
        """Run a step of `num_tokens` tokens on every rank, whole and in ubatches; after `prepare`."""
        return await self._stage("trace", self._call_all("trace", phase, num_tokens))

    async def watch(self) -> str | None:
        """Return when a rank has ended or hangs, because a group with a missing rank cannot take another step.

        Returns the reason, or None if the group was stopped.
        """
        epoch = self.status.epoch
        done = [result_future(rank.done.remote(epoch)) for rank in self._ranks]
        self._heartbeats = self._new_heartbeats()
        hang = asyncio.create_task(self._heartbeats.watch(self._ranks))
        first = asyncio.create_task(first_failure(done))
        try:
            await asyncio.wait({hang, first}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hang.cancel()
            first.cancel()
        if not self.health.alive:
            return None
        if not first.done():
            self._failed, self._hang = set(), hang.result()
            return self._hang.reason
        ended = first.result()
        error, rank = ended.exception(), done.index(ended)
        self._failed = {rank} if error is not None and step_failed(error) else set()
        reason = failure_message(error) if error is not None else "left its loop"
        return f"rank {rank}: {reason}"

    async def _rebuild(self, reason: str) -> None:
        """Bring the ranks into a new epoch, until they serve or no attempt is left.

        Living processes keep their weights, kernels and KV memory; a process that cannot leave the old epoch is
        replaced. The ranks of the new epoch refuse messages of the old one, and the other way round.
        """
        began, first_reason, first_attempt = time.monotonic(), reason, True
        if began - self._serving_since >= STABLE_S:
            self._num_failures = 0
        while self._num_failures < self._rebuild_attempts:
            self._num_failures += 1
            self.status.epoch += 1
            self.status.stages = [] if self._hang is None else [("detection", self._hang.seconds)]
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
                if isinstance(error, HungRankError):
                    self._hang = error.hang
                logger.debug("rebuild failed at stage %s", self.status.stage, exc_info=True)
                reason += (
                    f"; rebuild failed at stage {self.status.stage!r}: {failure_message(error)}"
                )
            else:
                seconds = time.monotonic() - began
                self.status.rebuilt(Rebuild(first_reason, seconds, tuple(self.status.stages)))
                logger.warning(
                    "serving again after %.1f s, as epoch %d", seconds, self.status.epoch
                )
                return
        if self._rebuild_attempts:
            reason += f" (after {self._num_failures} rebuilds in a row, cluster.rebuild_attempts)"
        self._end("failed", reason)

    async def _replace_failed(self) -> list[int]:
        """Let every rank leave its epoch, and replace the processes of the ranks that do not; return those ranks.

        Ranks that hang are replaced first: a peer that waits for one in a collective leaves when its process ends.
        """
        hang, self._hang = self._hang, None
        hung = hang.ranks if hang is not None else frozenset()
        if hung:
            self._ranks = await self._launcher.replace(hung)
        self._kept = set()
        others = [rank for rank in range(len(self._ranks)) if rank not in hung]
        left = await asyncio.gather(*map(self._leave, others))
        failed = [rank for rank, has_left in zip(others, left, strict=True) if not has_left]
        self._ranks = await self._launcher.replace(failed)
        self._kept = set(others) - set(failed)
        return [*hung, *failed]

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
        self.status.infos = await self._stage("engines", gather_ranks(started), guarded=True)
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

    async def _stage(
        self, name: str, work: Awaitable[T], *, limited: bool = True, guarded: bool = False
    ) -> T:
        """Run a stage of a start or rebuild.

        limited: within the time of the configuration.
        guarded: kept processes may not be silent; the first import of a new one may hold its lock for a long time.
        """
        self.status.stage, self.status.progress = name, (0, 0)
        started = time.monotonic()
        if guarded and self._kept:
            kept = {rank: self._ranks[rank] for rank in self._kept}
            work = self._new_heartbeats().guard(kept, work)
        try:
            outcome = await asyncio.wait_for(work, self._start_timeout_s if limited else None)
        except TimeoutError as error:
            raise StageTimeoutError(
                f"not done after {self._start_timeout_s:g} s; cluster.start_timeout_s allows more"
            ) from error
        self.status.stages.append((name, time.monotonic() - started))
        return outcome

    def _new_heartbeats(self) -> Heartbeats:
        config = self._config
        on_cpu = config.device == "cpu"
        return Heartbeats(config.num_ranks, self._hang_timeout_s, cpu_counts=on_cpu)

    def _end(self, state: GroupState, error: str) -> None:
        self._set_state(state, error)
        self._launcher.kill()

    def _set_state(self, state: GroupState, error: str = "") -> None:
        if state != self.status.state:
            self.status.since = time.time()
        self.status.state, self.status.error = state, error
        self._changed.set()
        self._changed = asyncio.Event()
