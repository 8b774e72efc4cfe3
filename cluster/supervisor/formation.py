"""Forms a group: brings the processes of a roster into an epoch, one stage after another, each with a time limit.

Knows nothing of states, failures and rebuilds.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from cluster.supervisor import placement
from cluster.supervisor.checkpoint_nodes import fetch_checkpoint
from cluster.supervisor.expert_balance import ExpertBalance
from cluster.supervisor.failures import (
    StageTimeoutError,
    failure_message,
    lacks_files,
    lost_a_peer,
    of_rank,
)
from cluster.supervisor.group_spec import GroupSpec
from cluster.supervisor.heartbeat import Heartbeats
from cluster.supervisor.launcher import RankHandle
from cluster.supervisor.ray_calls import result_future
from cluster.supervisor.roster import Roster
from cluster.supervisor.stage_progress import while_moving
from cluster.supervisor.status import GroupStatus
from workers.config import RankConfig
from workers.rank.rank_info import CHECKPOINT, RankInfo, Rendezvous, start_stages, total_progress
from workers.step.step_sync import compare_settings
from workers.wire.secure_socket import StreamAddress

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROGRESS_TIMEOUT_S = 0.5
MOST_PAUSE_S = 120.0
"""Longest pause of TCP before it sends again. Pauses double, so one lasts up to as long as the network was out."""


class Formation:
    """Writes the progress of the stages to `status`.

    spec              of the group; the groups of a server share the KV in the memory of a node
    start_timeout_s   time of each stage; of the stage `checkpoint`, time without progress
    leave_timeout_s   time of a rank to leave an epoch
    new_heartbeats    makes the watch of a stage
    balance           of the experts, over all epochs
    adapters          LoRA adapters that the ranks load before they serve
    kept              processes that the last rebuild has kept, less those that still start
    """

    def __init__(
        self,
        spec: GroupSpec,
        roster: Roster,
        status: GroupStatus,
        *,
        start_timeout_s: float,
        leave_timeout_s: float,
        new_heartbeats: Callable[[], Heartbeats],
    ):
        self._name, self._store = spec.name, spec.config.serve.app_name
        self._roster = roster
        self._status = status
        self.start_timeout_s = start_timeout_s
        self._leave_timeout_s = leave_timeout_s
        self._new_heartbeats = new_heartbeats
        self.kept: list[RankHandle] = []
        self.balance = ExpertBalance()
        self.adapters = roster.config.adapters
        self._inboxes: list[StreamAddress] = []

    async def join(self) -> None:
        """Let the processes form the group of the present epoch, up to the point where an engine can start."""
        roster = self._roster
        await self.stage("processes", self.locate(), guarded=True)
        if roster.config.model.revision is not None or roster.config.fetch_weights:
            calls = [partial(self._call, *pair) for pair in enumerate(roster.ranks)]
            fetched = fetch_checkpoint(roster.config, calls, self._status.locations)
            moving = while_moving(fetched, roster.ranks, self.start_timeout_s)
            await self.stage(CHECKPOINT, moving, limited=False, guarded=True)
        await self.stage("group", self._join(), guarded=True)
        for stage in start_stages(roster.config.device):
            await self.stage(stage, self.call_all("run_stage", stage), guarded=True)

    async def _join(self) -> None:
        roster, locations = self._roster, self._status.locations
        ((host, port),) = await self._gather([roster.ranks[0].host_rendezvous.remote()])
        epoch = self._status.epoch
        name = f"{self._name}-{epoch}-{secrets.token_hex(16)}"
        secret, layout = secrets.token_bytes(32), self.balance.layout
        rendezvous = Rendezvous(host, port, name, epoch, secret, layout, self._store)
        roster.called()
        config = roster.config.model_copy(update={"adapters": self.adapters})
        await self._gather(
            rank.join_group.remote(
                rendezvous, self.start_timeout_s, visible_gpus(locations, own), index, config
            )
            for index, (rank, own) in enumerate(zip(roster.ranks, locations, strict=True))
        )

    async def replace(self, hung: frozenset[int], target: RankConfig, *, anew: bool) -> set[int]:
        """Let every rank leave its epoch; replace the processes of ranks that do not, and those that `target` changes.

        Ranks that hang end first: a peer that waits for one in a collective leaves when its process ends. A rank on
        a node that cannot be reached keeps its process if it leaves when the network is back. A process that starts and
        was called into no epoch goes on with its start.
        Returns the ranks that failed by themselves, by their numbers in that epoch.

        anew: replace the processes of all ranks
        """
        self.balance.end()
        roster, before, self.kept = self._roster, self._roster.ranks, []
        ranks = range(len(before))
        cut = await roster.cut_off(hung)
        roster.end(hung - cut)
        called = [rank for rank in ranks if roster.was_called(rank)]
        others = [rank for rank in called if rank not in hung]
        left = dict(zip(others, await asyncio.gather(*map(self.leave, others)), strict=True))
        dead = {rank for rank in called if not left.get(rank)}
        cut |= await roster.cut_off(dead - hung)
        failed = dead - cut
        if not roster.may_shrink:
            out_s = self._leave_timeout_s + await roster.wait_for_nodes(dead, self.start_timeout_s)
            late_s = min(out_s, MOST_PAUSE_S)
            back = await asyncio.gather(*(self.leave(rank, late_s=late_s) for rank in cut))
            dead -= {rank for rank, has_left in zip(cut, back, strict=True) if has_left}
        await roster.renew([rank not in dead for rank in ranks], target, anew=anew)
        joined = [before[rank] for rank in called]
        self.kept = [rank for rank in roster.ranks if rank in joined]
        return failed

    async def start_engines(self) -> None:
        """Start the step loops, after `join`."""
        roster, inboxes = self._roster, self._inboxes
        started: list[Awaitable[RankInfo]] = [
            rank.start.remote(self._status.epoch, roster.config.dims.of_peers(index, inboxes))
            for index, rank in enumerate(roster.ranks)
        ]
        self._status.infos = await self.stage("engines", self._gather(started), guarded=True)
        self.balance.begin(roster.ranks, self._status.epoch, roster.config)

    async def take_over(self) -> str:
        """Locate ranks that serve, after a restart of the supervisor, and balance their experts.

        Returns why the group must be rebuilt, if a rank has ended or hangs since it was found; otherwise "".
        """
        ranks = dict(enumerate(self._roster.ranks))
        try:
            await self._new_heartbeats().guard(ranks, self.locate())
        except Exception as error:
            return f"the supervisor was restarted, and lost a rank: {failure_message(error)}"
        self.balance.begin(self._roster.ranks, self._status.epoch, self._roster.config)
        return ""

    async def leave(self, rank: int, *, late_s: float = 0.0) -> bool:
        """Let a rank leave its epoch before the present one; return whether it has left in time.

        late_s   by which the call may arrive late
        """
        limit_s = self._leave_timeout_s + late_s
        call = self._roster.ranks[rank].leave_epoch.remote(self._status.epoch)
        try:
            async with asyncio.timeout(limit_s):
                await call
        except TimeoutError:
            logger.warning(
                "rank %d did not leave its epoch within %.3g s (cluster.hang_timeout_s); it gets a new process",
                rank,
                limit_s,
            )
            return False
        except Exception as error:
            logger.warning("rank %d gets a new process: %s", rank, failure_message(error))
            return False
        return True

    async def refresh_progress(self) -> None:
        """Fetch the progress of the present stage from the ranks."""
        status = self._status
        if status.stage in (CHECKPOINT, *start_stages(self._roster.config.device)):
            calls = [result_future(rank.progress.remote()) for rank in self._roster.ranks]
            done, _ = await asyncio.wait(calls, timeout=PROGRESS_TIMEOUT_S)
            parts = [call.result() for call in done if call.exception() is None]
            status.progress = total_progress(status.stage, parts)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call `method` on every rank at once. The first failure is raised at once."""
        return await self._gather(
            [getattr(rank, method).remote(*args) for rank in self._roster.ranks]
        )

    async def stage(
        self, name: str, work: Awaitable[T], *, limited: bool = True, guarded: bool = False
    ) -> T:
        """Run a stage of a start or rebuild.

        limited: within the time of the configuration.
        guarded: kept processes may not be silent; the first import of a new one may hold its lock for a long time.
        """
        status = self._status
        status.stage, status.progress = name, (0, 0)
        started = time.monotonic()
        if guarded and self.kept:
            ranks = enumerate(self._roster.ranks)
            kept = {index: rank for index, rank in ranks if rank in self.kept}
            work = self._new_heartbeats().guard(kept, work)
        limit = asyncio.timeout(self.start_timeout_s if limited else None)
        try:
            async with limit:
                outcome = await work
        except TimeoutError as error:
            if not limit.expired():  # the error of a rank, of a limit of its own
                raise
            raise StageTimeoutError(
                f"not done after {self.start_timeout_s:g} s; cluster.start_timeout_s allows more"
            ) from error
        status.stages.append((name, time.monotonic() - started))
        return outcome

    async def _gather(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """The results of one call to every rank, in rank order; the roster learns which ranks failed or were late."""
        ranks = self._roster.ranks
        watched = (self._watched(rank, ranks[rank], call) for rank, call in enumerate(calls))
        return await asyncio.gather(*watched)

    async def _call(self, rank: int, handle: RankHandle, method: str, *args: Any) -> Any:
        """The result of a call to one rank; the roster learns whether it failed or was late."""
        return await self._watched(rank, handle, getattr(handle, method).remote(*args))

    async def _watched(self, rank: int, handle: RankHandle, call: Awaitable[T]) -> T:
        try:
            return await of_rank(rank, call)
        except (Exception, asyncio.CancelledError) as error:
            if not (lacks_files(error) or lost_a_peer(error)):
                self._roster.failed(handle)
            raise

    async def locate(self) -> None:
        """Fetch from every rank its place and its versions, and check both."""
        described = await self.call_all("describe")
        self._inboxes = [facts["inbox"] for facts in described]
        self._status.locations = [
            placement.located(rank, facts) for rank, facts in enumerate(described)
        ]
        self._roster.located(self._status.locations)
        placement.verify(self._status.locations, self._roster.config)
        compare_settings([facts["versions"] for facts in described], "versions")


def visible_gpus(
    locations: Sequence[placement.RankLocation], own: placement.RankLocation
) -> Sequence[int | str]:
    """The GPUs that a process is to see for its life."""
    num_gpus = placement.gpus_of_node(own.node_id) if own.gpu_ids else 0
    return placement.visible_gpus(locations, own, num_gpus)
