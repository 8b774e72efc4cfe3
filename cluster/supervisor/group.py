"""One group: the ranks that share a process group, with their epoch and state.

A Group brings its ranks up stage by stage, rebuilds itself as a new epoch when a rank ends, and takes the ranks down.
Knows nothing of ingresses beyond the names of their streams, and nothing of HTTP.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from cluster.config.phalanx_config import Role
from cluster.errors import SHUTDOWN_REASON
from cluster.supervisor import epoch_watch, placement, relocation
from cluster.supervisor.attempts import Attempts
from cluster.supervisor.change import PendingChange
from cluster.supervisor.failures import RankDiedError, failure_message, lacks_files
from cluster.supervisor.formation import Formation, visible_gpus
from cluster.supervisor.group_adapters import GroupAdapters
from cluster.supervisor.group_spec import GroupSpec
from cluster.supervisor.heartbeat import Hang, Heartbeats, HungRankError
from cluster.supervisor.launcher import Launcher
from cluster.supervisor.placement import NodeLostError, PlacementError
from cluster.supervisor.ray_calls import result
from cluster.supervisor.recovery import find_memberships, recover
from cluster.supervisor.roster import Roster
from cluster.supervisor.slow_ranks import SlowRanks
from cluster.supervisor.status import GroupHealth, GroupMembers, GroupState, GroupStatus, Rebuild
from kernels.host.owned import OwnedTask
from workers.config import RankConfig
from workers.rank.rank_info import RankTrace

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 3.0
STABLE_S = 5.0
"""Seconds of service after which a failure is not counted as a result of the rebuild before."""
FILES_RETRY_S = 1.0
"""Seconds between two rebuilds while files or space for them are missing; they do not count as attempts."""


async def _keep_nothing(epoch: int) -> None:
    """What a group without an owner does as an epoch begins."""


class Group:
    """The ranks of one process group. All methods run in the event loop of the supervisor.

    spec: what was configured; the ranks change in service.
    hang_timeout_s: time without a sign of life after which a rank hangs, and time for a rank to leave a failed epoch;
        a rank that takes longer gets a new process.
    rebuild_attempts: rebuilds in a row that may fail, or serve for less than STABLE_S; 0 = a failed rank ends the
        group.
    standby_ranks, shrink: see Roster.
    slow_ranks: finds the slow ones; without it, none is slow.
    epoch_begins: called with the number of each epoch before a rank joins it.
    """

    def __init__(
        self,
        spec: GroupSpec,
        launcher: Launcher,
        *,
        start_timeout_s: float,
        hang_timeout_s: float = 5.0,
        rebuild_attempts: int = 0,
        standby_ranks: int = 0,
        shrink: bool = False,
        slow_ranks: SlowRanks | None = None,
        epoch_begins: Callable[[int], Awaitable[None]] = _keep_nothing,
    ):
        self.spec = spec
        self.status = GroupStatus(spec.name, spec.role)
        self._roster = Roster(
            launcher,
            spec.ranks,
            self._visible_gpus,
            self.fail_task,
            num_standby=standby_ranks,
            shrink=shrink,
        )
        self._formation = Formation(
            spec,
            self._roster,
            self.status,
            start_timeout_s=start_timeout_s,
            leave_timeout_s=hang_timeout_s,
            new_heartbeats=self._new_heartbeats,
        )
        self.adapters = GroupAdapters(self._roster, self._formation)
        self._change = PendingChange()
        self._hang_timeout_s = hang_timeout_s
        self.attempts = Attempts(rebuild_attempts)
        self._failed: set[int] = set()
        self._ended: frozenset[int] = frozenset()
        self._slow_ranks = slow_ranks or SlowRanks()
        self._heartbeats = self._new_heartbeats()
        self._hang: Hang | None = None
        self._serving_since = 0.0
        self._draining = False
        self._epoch_begins = epoch_begins
        self._growing: OwnedTask | None = None
        self._changed = asyncio.Event()

    @property
    def health(self) -> GroupHealth:
        """State, epoch, error and role."""
        return self.status.health

    @property
    def members(self) -> GroupMembers:
        """The ranks of this epoch."""
        return GroupMembers(
            self.status.epoch, self._roster.ranks, self.status.infos, frozenset(self._failed)
        )

    async def refreshed_status(self) -> GroupStatus:
        """The status, with the progress that the ranks report now."""
        status = self.status
        status.vote_ages = self._heartbeats.vote_ages() if self.health.alive else []
        status.slow, status.slowdowns = self._slow_ranks.slow, self._slow_ranks.slowdowns
        if status.state in ("starting", "rebuilding"):
            await self._formation.refresh_progress()
        return status

    async def recover(self, wanted: RankConfig | None, last_epoch: int) -> frozenset[str]:
        """Take over the ranks that an earlier process of the supervisor has left; `run` comes next.

        Ranks that serve go on, otherwise `run` rebuilds the group. Returns the streams that ingresses have open.
        wanted: as changes in service have left it
        last_epoch: the last one that began; without ranks the next one begins
        """
        actors = self._roster.find()
        if not actors:
            self.status.epoch = last_epoch + 1
            return frozenset()
        if wanted is not None:
            self._roster.config = self._roster.wanted = wanted
        memberships = await find_memberships(actors, self._hang_timeout_s)
        found = recover(memberships, self._roster.config)
        await self._roster.recover(found.config, found.seats, actors)
        self.status.epoch, self.status.infos = found.epoch, found.infos
        reason = found.reason or await self._formation.take_over()
        if reason:
            self.status.epoch = max(found.epoch, last_epoch)
            self._set_state("rebuilding", reason)
        else:
            self._set_serving()
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
            elif self._change.requested:
                await self._rebuild(self._change.reason, self._change)

    async def start(self) -> None:
        """Bring the ranks up until they serve. On an error the state is failed; after a death it may be rebuilding."""
        try:
            await self._epoch_begins(self.status.epoch)
            await self.prepare()
            await self._serve()
        except Exception as error:
            if self.health.ended:
                return  # stop() or fail() killed the ranks
            # The console shows the message of a user's mistake; a traceback would hide it.
            explained = isinstance(error, ValueError | RankDiedError)
            level = logging.DEBUG if explained else logging.ERROR
            logger.log(level, "start failed at stage %s", self.status.stage, exc_info=True)
            message = f"start failed at stage {self.status.stage!r}: {failure_message(error)}"
            if isinstance(error, RankDiedError) and self.attempts.limit:
                self._set_state("rebuilding", message)
            else:
                self._end("failed", message)

    async def prepare(self) -> None:
        """Bring the ranks up to the point where an engine can start."""
        launched = self._roster.launch(self._formation.start_timeout_s)
        await self._formation.stage("placement", launched)
        await self._formation.join()

    async def trace(self, phase: str, num_tokens: int) -> list[RankTrace]:
        """Run a step of `num_tokens` tokens on every rank, whole and in ubatches; after `prepare`."""
        traces = self._formation.call_all("trace", phase, num_tokens)
        return await self._formation.stage("trace", traces)

    async def watch(self) -> str | None:
        """Return when a rank has ended or hangs, because a group with a missing rank cannot take another step.

        Returns the reason, or None if the group was stopped or a change of it is to begin.
        """
        self._slow_ranks.begin(self.status.locations)
        self._heartbeats = self._new_heartbeats(self._slow_ranks)
        ended = await epoch_watch.watch(
            self._roster.ranks, self.status.epoch, self._heartbeats, self._change
        )
        self._failed, self._hang, self._ended = set(), None, frozenset()
        if ended is None or not self.health.alive:
            return None
        self._failed, self._hang, self._ended = set(ended.failed), ended.hang, ended.ranks
        return ended.reason

    async def change(
        self, config: RankConfig, reason: str, *, anew: bool = False, avoided: Collection[int] = ()
    ) -> None:
        """Go on with `config` in a new epoch, which the open requests wait for; processes start before the pause.

        Raises ValueError if that is impossible; the group then serves as before.

        anew: replace the processes of all ranks
        avoided: bundles in which no process starts before the pause
        """
        if self.status.state != "serving":
            raise ValueError(f"the group is {self.status.state}; it can be changed while it serves")
        with self._change.request(config, reason, anew=anew) as change:
            try:
                await change.provide(self._roster.provide, avoided)
            except PlacementError as error:
                if not anew:
                    raise
                logger.warning("the ranks end before the new ones start: %s", error)
            await change.make()

    async def _rebuild(self, reason: str, change: PendingChange | None = None) -> None:
        """Bring the ranks into a new epoch, until they serve or no attempt is left.

        Living processes keep their weights, kernels and KV memory; a process that cannot leave the old epoch is
        replaced. The ranks of the new epoch refuse messages of the old one, and the other way round. If a change
        fails, the next attempt is without it.
        """
        began, first_reason, first_attempt = time.monotonic(), reason, True
        before = self._roster.wanted
        if began - self._serving_since >= STABLE_S:
            self.attempts.forget()
        may_try = change is not None or self.attempts.fail(self.status.epoch, self._ended)
        while may_try and not self.health.ended:
            self.status.epoch += 1
            self.status.stages = [] if self._hang is None else [("detection", self._hang.seconds)]
            self._set_state("rebuilding", reason, planned=change is not None)
            logger.warning("rebuilding as epoch %d: %s", self.status.epoch, reason)
            try:
                await self._epoch_begins(self.status.epoch)
                dead = await self._replace(change)
                if first_attempt:
                    self._failed |= dead
                    first_attempt = False
                await self._formation.join()
                if change is not None:
                    self._roster.wanted = change.config
                await self._serve()
            except Exception as error:
                if self.health.ended:
                    return  # stop() killed the ranks
                if isinstance(error, HungRankError):
                    self._hang = error.hang
                logger.debug("rebuild failed at stage %s", self.status.stage, exc_info=True)
                failed = f"rebuild failed at stage {self.status.stage!r}: {failure_message(error)}"
                if change is None and lacks_files(error) and self._may_wait(began):
                    reason = reason if reason.endswith(failed) else f"{reason}; {failed}"
                    await asyncio.sleep(FILES_RETRY_S)
                    continue
                reason += f"; {failed}"
                if change is not None:
                    change.fail(failed)
                    change, self._roster.wanted = None, before
                may_try = self.attempts.fail() and not isinstance(error, NodeLostError)
            else:
                seconds = time.monotonic() - began
                self.status.rebuilt(Rebuild(first_reason, seconds, tuple(self.status.stages)))
                epoch = self.status.epoch
                logger.warning("serving again after %.1f s, as epoch %d", seconds, epoch)
                if change is not None:
                    change.succeed()
                return
        if self.health.ended:
            return
        if self.attempts.used_up:
            reason += f" (after {self.attempts.limit} rebuilds in a row, cluster.rebuild_attempts)"
        self.fail(reason)

    async def _replace(self, change: PendingChange | None) -> set[int]:
        """Bring the processes of the next epoch together. Returns the ranks that failed by themselves."""
        hang, self._hang = self._hang, None
        hung = hang.ranks if hang is not None else frozenset()
        target = self._roster.wanted if change is None else change.config
        anew = change is not None and change.anew
        replaced = self._formation.replace(hung, target, anew=anew)
        return await self._formation.stage("replacement", replaced, limited=False)

    def _may_wait(self, began: float) -> bool:
        """Return whether a rebuild that has begun then may wait for files."""
        return time.monotonic() - began < self._formation.start_timeout_s

    async def leave_draining_nodes(self) -> float | None:
        """Move the ranks away from nodes that Ray drains, see `relocation`."""
        if self.status.state != "serving":
            return None
        return await relocation.leave_draining_nodes(self._roster, self.change)

    def close_stream(self, stream_id: str) -> None:
        """Let every rank forget the requests and the stream of an ingress that is gone."""
        for rank in self._roster.ranks:
            rank.close_stream.remote(self.status.epoch, stream_id)

    def take_role(self, role: Role) -> None:
        """Have another part of new requests; the open ones go on."""
        self.status.role = role
        self._set_state(self.status.state, self.status.error, planned=self.status.planned)

    def drain(self) -> None:
        """Note that no new requests come."""
        self._draining = True
        if self.status.state == "serving":
            self._set_state("draining")

    def fail(self, reason: str) -> None:
        """End the group as failed, unless it has ended."""
        if not self.health.ended:
            self._change.fail(reason)
            self._end("failed", reason)

    def fail_task(self, error: BaseException) -> None:
        """End the group as failed, because a task that it needs has ended."""
        logger.error("group %s failed", self.spec.name, exc_info=error)
        self.fail(f"{type(error).__name__}: {error}")

    async def stop(self) -> None:
        """Stop the ranks and give back their resources."""
        was_alive, epoch = self.health.alive, self.status.epoch
        self._set_state("stopped", SHUTDOWN_REASON)  # before a rank ends, which is no failure now
        self._change.fail(SHUTDOWN_REASON)
        if was_alive:
            done = [rank.done.remote(epoch) for rank in self._roster.ranks]
            self._roster.ranks[0].stop.remote(epoch)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await asyncio.gather(*map(result, done), return_exceptions=True)
            except TimeoutError:
                logger.warning("ranks did not stop within %g s and are killed", STOP_TIMEOUT_S)
        self._kill()

    async def changed(self, seen: GroupHealth) -> None:
        """Return as soon as the health differs from `seen`."""
        while self.health == seen:
            await self._changed.wait()

    async def _serve(self) -> None:
        """Start the step loops; serve from then on."""
        await self._formation.start_engines()
        if self.health.ended:
            return  # stop() came while the last rank answered
        if self.status.state == "starting":
            self.adapters.check(self.status.infos)
        self._set_serving()

    def _set_serving(self) -> None:
        self._serving_since = time.monotonic()
        self._set_state("draining" if self._draining else "serving")
        self._roster.serves()
        if self._roster.shrunk and (self._growing is None or self._growing.done):
            serves = lambda: self.status.state == "serving"  # noqa: E731
            growing = relocation.grow(self._roster, serves, self.change)
            self._growing = OwnedTask(growing, self.fail_task, "grow", may_end=True)

    def _visible_gpus(self, facts: dict[str, Any]) -> Sequence[int | str]:
        """The GPUs that a process with this description is to see."""
        return visible_gpus(self.status.locations, placement.located(-1, facts))

    def _new_heartbeats(self, slow_ranks: SlowRanks | None = None) -> Heartbeats:
        config, limit_s = self._roster.config, self._hang_timeout_s
        on_cpu = config.device == "cpu"
        return Heartbeats(config.num_ranks, limit_s, cpu_counts=on_cpu, slow_ranks=slow_ranks)

    def _end(self, state: GroupState, error: str) -> None:
        self._set_state(state, error)
        self._kill()

    def _kill(self) -> None:
        if self._growing is not None:
            self._growing.cancel()
        self._roster.kill()

    def _set_state(self, state: GroupState, error: str = "", *, planned: bool = False) -> None:
        if state != self.status.state:
            self.status.since = time.time()
        self.status.state, self.status.error, self.status.planned = state, error, planned
        self._changed.set()
        self._changed = asyncio.Event()
