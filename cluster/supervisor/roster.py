"""Seats the ranks of each epoch: processes that stay, standbys, new processes, and the nodes of all.

Knows nothing of epochs, stages or requests.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cluster.supervisor import lost_nodes
from cluster.supervisor.failures import failure_message
from cluster.supervisor.launcher import Launcher, RankHandle
from cluster.supervisor.members import Member, Standby, all_ready, live, note_end
from cluster.supervisor.placement import PlacementError, RankLocation, resized
from cluster.supervisor.ray_calls import result, result_future
from kernels.host.owned import Failed, OwnedTask
from kernels.routing.expert_map import STANDBY
from workers.config import RankConfig

logger = logging.getLogger(__name__)

RESTOCK_S = 5.0
"""Seconds before a standby that ended is replaced."""
REPLACEMENT_S = 30.0
"""Time of a new process to answer, before a group that may shrink goes on without it."""


class Roster:
    """All methods run in the event loop of the supervisor.

    config        of the present epoch; `wanted` has the number of ranks that was configured last
    num_standby   standbys that are kept ready beside the ranks
    shrink        go on with fewer ranks where a rank cannot be replaced
    visible_gpus  the GPUs that the process with this description is to see, from `Group`
    failed        called with the error that ended the task which keeps standbys in stock
    """

    def __init__(
        self,
        launcher: Launcher,
        config: RankConfig,
        visible_gpus: Callable[[dict[str, Any]], Sequence[int | str]],
        failed: Failed,
        *,
        num_standby: int = 0,
        shrink: bool = False,
    ):
        self.config = self.wanted = config
        self._launcher = launcher
        self._visible_gpus, self._failed = visible_gpus, failed
        self._num_standby, self.may_shrink, self._spared = num_standby, shrink, False
        self._members: list[Member] = []
        self._bundles = list(range(config.num_nodes))  # by node of the group
        self._standbys: list[Standby] = []
        self._new: set[Member] = set()  # since the last epoch that served
        self._broken: set[Member] = set()
        self._irreplaceable: set[int] = set()  # bundles on which a new process failed
        self._stock = asyncio.Event()
        self._stocking: OwnedTask | None = None
        self._sparing: asyncio.Future[None] | None = None

    @property
    def ranks(self) -> list[RankHandle]:
        """The processes of the ranks, in order."""
        return [member.handle for member in self._members]

    @property
    def shrunk(self) -> bool:
        """Whether the group has fewer ranks than configured."""
        return self.config.num_ranks < self.wanted.num_ranks

    async def launch(self, timeout_s: float) -> None:
        """Create the processes of all ranks."""
        self.adopt(await self._launcher.launch(timeout_s))

    def adopt(self, handles: Sequence[RankHandle]) -> None:
        """Take these processes as the ranks."""
        node = self.config.dims.node
        self._members = [Member(h, node(rank), self.config) for rank, h in enumerate(handles)]

    def end(self, ranks: Collection[int]) -> None:
        """End the processes of ranks that hang, which `renew` replaces."""
        for rank in ranks:
            member = self._members[rank]
            self._launcher.end(member.handle, member.location)

    def located(self, locations: Sequence[RankLocation]) -> None:
        """Note where the processes of the ranks run."""
        for member, location in zip(self._members, locations, strict=True):
            member.location = location

    def find(self) -> list[RankHandle]:
        """The processes that an earlier process of the supervisor has left."""
        return self._launcher.find()

    async def recover(
        self, config: RankConfig, seats: Mapping[int, RankHandle], found: Sequence[RankHandle]
    ) -> None:
        """Continue with found processes as the ranks in `seats`: create those of missing ranks, end the other ones."""
        if not self.may_shrink or config.num_ranks > self.wanted.num_ranks:
            self.wanted = config
        self.config = config
        for handle in found:
            if handle not in seats.values():
                self._launcher.end(handle, None)
        self._spared = True
        used = sorted({self._launcher.bundle_of(handle) for handle in seats.values()})
        self._bundles = used if len(used) == config.num_nodes else list(range(config.num_nodes))
        self._members = []
        for rank in config.dims.ranks():
            bundle = self._bundles[config.dims.node(rank)]
            handle = seats.get(rank) or await self._launcher.start(rank, config, bundle)
            self._members.append(Member(handle, bundle, config, called=rank in seats))

    async def renew(
        self, living: Sequence[bool], target: RankConfig, *, anew: bool = False
    ) -> None:
        """Seat the ranks of `target`: processes that live stay, others are replaced by standbys or new processes.

        With `shrink`, `config` has fewer ranks afterwards where a rank has no place or no replacement that starts.

        anew: replace all processes
        """
        drained = await lost_nodes.leave_draining(self._launcher, range(target.num_nodes))
        full = set(drained) if self.may_shrink else set()
        stay: list[Member | None] = []
        for member, lives in zip(self._members, living, strict=True):
            works = lives and member not in self._broken
            kept = works and not anew and member.bundle not in full and self._stays(member, target)
            if not works and member in self._new:
                self._irreplaceable.add(member.bundle)
            if not kept:
                self._end(member)
            stay.append(member if kept else None)
        if self.may_shrink:
            await lost_nodes.wait_for_capacity(self._launcher, target.num_nodes)
        while True:
            config, bundles = await self._fit(target, [m for m in stay if m is not None], full)
            self._members = await self._seat(config, bundles, stay)
            self.config, self._bundles = config, bundles
            late = await self._late() if self.may_shrink else []
            if not late:
                return
            for member in late:
                self._irreplaceable.add(member.bundle)
                self._end(member)
            stay = [None if member in late else member for member in self._members]

    def called(self) -> None:
        """Note that all processes are called to join an epoch."""
        for member in self._members:
            member.called = True

    def was_called(self, rank: int) -> bool:
        """Whether the process of a rank was called to join an epoch."""
        return self._members[rank].called

    def failed(self, handle: RankHandle) -> None:
        """Note that a call to a rank failed. A process that has not served yet is not used again."""
        for member in self._members:
            if member.handle == handle and (member in self._new or not member.called):
                self._broken.add(member)

    def serves(self) -> None:
        """Note that the ranks serve; standbys that are missing start now, or a spare process in place of a used one."""
        if not self._num_standby and (self._new or not self._spared):
            self._spared = True
            self._sparing = result_future(self._launcher.start_spares())
        for noted in (self._new, self._broken, self._irreplaceable):
            noted.clear()
        if self._stocking is None and self._num_standby:
            self._stocking = OwnedTask(self._keep_stock(), self._failed, "keep-stock")
        self._stock.set()
        usable = [s for s in self._standbys if self._stays(s, self.config)]
        for standby in self._standbys[:]:
            if standby not in usable[: self._num_standby]:
                self._discard(standby)

    async def provide(
        self, target: RankConfig, *, anew: bool = False, avoided: Collection[int] = ()
    ) -> bool:
        """Start and load the processes that `target` needs beside the present ones, as standbys.

        Returns False if a rebuild has used or ended one. Raises PlacementError when a node has no room for them.

        avoided: bundles that the group leaves
        """
        started: list[Standby] = []
        needed: list[Standby] = []
        try:
            for bundle in set(range(target.num_nodes)).difference(avoided):
                stay = [] if anew else [m for m in self._members if m.bundle == bundle]
                stay = [m for m in stay if self._stays(m, target)]
                missing = max(0, target.dims.ranks_per_node - len(stay))
                usable = self._usable(bundle, target)[:missing]
                while len(usable) < missing:
                    usable.append(await self._start_standby(bundle, target))
                    started.append(usable[-1])
                needed += usable
            return await all_ready(needed)
        except BaseException:
            for standby in started:
                self._discard(standby)
            raise

    def _stays(self, member: Member, config: RankConfig) -> bool:
        """Whether a process can be a rank of `config` where it is."""
        return not member.config.differs_for_process(config) and self._launcher.in_place(
            member.handle
        )

    async def leave_draining(self) -> tuple[dict[int, float], bool]:
        """Reserve other nodes in place of those that Ray drains; the processes follow in the next epoch.

        Returns the bundles for which no node has room, with the seconds until the end of their nodes, and whether a
        process has to follow.
        """
        bundles = {member.bundle for member in self._members}
        stuck = await lost_nodes.leave_draining(self._launcher, bundles)
        return stuck, not all(self._launcher.in_place(m.handle) for m in self._members)

    def can_leave_out(self, bundles: Collection[int]) -> bool:
        """Whether the group may go on without the ranks of `bundles`, and has other ranks."""
        return self.may_shrink and any(m.bundle not in bundles for m in self._members)

    async def has_room_to_grow(self) -> bool:
        """Whether every node that the wanted ranks need can be reached, and stays."""
        bundles = range(self.wanted.num_nodes)
        draining = bool(await lost_nodes.leave_draining(self._launcher, bundles))
        return not draining and not await lost_nodes.silent(self._launcher, bundles)

    async def cut_off(self, ranks: Collection[int]) -> set[int]:
        """Return those of `ranks` with nodes that cannot be reached; their processes may live."""
        silent = await lost_nodes.silent(
            self._launcher, {self._members[rank].bundle for rank in ranks}
        )
        return {rank for rank in ranks if self._members[rank].bundle in silent}

    async def wait_for_nodes(self, ranks: Collection[int], limit_s: float) -> float:
        """See lost_nodes."""
        of_bundle: dict[int, list[int]] = {}
        for rank in ranks:
            of_bundle.setdefault(self._members[rank].bundle, []).append(rank)
        return await lost_nodes.wait_for_nodes(self._launcher, of_bundle, limit_s)

    def kill(self) -> None:
        """End all processes."""
        if self._stocking is not None:
            self._stocking.cancel()
        if self._sparing is not None:
            self._sparing.cancel()
        for standby in self._standbys:
            standby.release()
        self._standbys = []
        self._launcher.kill()

    async def _fit(
        self, target: RankConfig, stay: list[Member], full: set[int]
    ) -> tuple[RankConfig, list[int]]:
        """The largest layout that can be seated: equally many ranks on some nodes. Returns it with their bundles.

        full: bundles without room for a new process, beside those known here
        """
        per_node = target.dims.ranks_per_node
        bundles = list(range(target.num_nodes))
        if not self.may_shrink:
            return target, bundles
        capacity = dict.fromkeys(bundles, per_node)
        full = full | self._irreplaceable | await lost_nodes.silent(self._launcher, bundles)
        for bundle in full.intersection(bundles):
            capacity[bundle] = sum(member.bundle == bundle for member in stay)
        layouts = [
            (count, [b for b in bundles if capacity[b] >= count])
            for count in range(1, per_node + 1)
        ]
        count, bundles = max(layouts, key=lambda layout: (layout[0] * len(layout[1]), layout[0]))
        if not bundles:
            raise PlacementError("no rank is left, and no node has room for one")
        if count * len(bundles) == target.num_ranks:
            return target, bundles
        dims = {"num_ranks": count * len(bundles), "num_nodes": len(bundles)}
        logger.warning("going on with %d of %d ranks", dims["num_ranks"], target.num_ranks)
        return resized(target, **dims), bundles

    async def _seat(
        self, config: RankConfig, bundles: list[int], stay: list[Member | None]
    ) -> list[Member]:
        """Return a process for each rank; end those that have none. A rank keeps its process if no rank is added."""
        seats: list[Member | None] = stay
        if len(stay) != config.num_ranks or bundles != self._bundles:
            count = config.dims.ranks_per_node
            seats = []
            for bundle in bundles:
                here = [member for member in stay if member and member.bundle == bundle][:count]
                seats += [*here, *[None] * (count - len(here))]
            for member in stay:
                if member is not None and member not in seats:
                    self._end(member)
        started: dict[int, Member] = {}
        try:
            for rank, member in enumerate(seats):
                if member is None:
                    started[rank] = await self._fill_seat(rank, config, bundles)
        except BaseException:
            for member in started.values():
                self._end(member)
            raise
        return [member or started[rank] for rank, member in enumerate(seats)]

    async def _fill_seat(self, rank: int, config: RankConfig, bundles: list[int]) -> Member:
        bundle = bundles[config.dims.node(rank)]
        member = self._take_standby(bundle, config)
        if member is None:
            handle = await self._launcher.start(rank, config, bundle)
            member = Member(handle, bundle, config)
        self._new.add(member)
        return member

    def _take_standby(self, bundle: int, config: RankConfig) -> Member | None:
        usable = self._usable(bundle, config)
        if not usable:
            return None
        self._standbys.remove(usable[0])
        usable[0].release()
        return Member(usable[0].handle, bundle, config)

    def _usable(self, bundle: int, config: RankConfig) -> list[Standby]:
        """The standbys of a bundle that can become ranks of `config`, first those that have loaded."""
        found = [s for s in self._standbys if s.bundle == bundle and not s.ended]
        found = [s for s in found if self._stays(s, config)]
        return sorted(found, key=lambda standby: not standby.ready.done())

    async def _late(self) -> list[Member]:
        """The new processes that do not answer in time."""
        new = [member for member in self._members if member in self._new]
        calls = [asyncio.ensure_future(result(m.handle.describe.remote())) for m in new]
        if calls:
            await asyncio.wait(calls, timeout=REPLACEMENT_S)
        late = [
            member
            for member, call in zip(new, calls, strict=True)
            if not call.done() or call.exception() is not None
        ]
        for call in calls:
            call.cancel()
        return late

    async def _start_standby(self, bundle: int, config: RankConfig) -> Standby:
        handle = await self._launcher.start(STANDBY, config, bundle)
        ready = result_future(self._prepare(handle))
        life = result_future(live(ready, handle))
        life.add_done_callback(note_end)
        standby = Standby(handle, bundle, config, ready, life)
        self._standbys.append(standby)
        return standby

    async def _prepare(self, handle: RankHandle) -> None:
        gpus = self._visible_gpus(await result(handle.describe.remote()))
        await result(handle.prepare.remote(gpus))

    async def _keep_stock(self) -> None:
        """Start standbys where some are missing or have ended, one at a time."""
        while True:
            self._stock.clear()
            for standby in [standby for standby in self._standbys if standby.ended]:
                self._discard(standby)
            try:
                while len(self._standbys) < self._num_standby:
                    fewest = min(
                        self._bundles, key=lambda b: sum(s.bundle == b for s in self._standbys)
                    )
                    standby = await self._start_standby(fewest, self.config)
                    await asyncio.wait([standby.ready])
                    if standby.ended or self._stock.is_set():
                        break
            except PlacementError as error:
                logger.warning("no standby rank (cluster.standby_ranks): %s", error)
                await self._stock.wait()
                continue
            except Exception as error:  # Ray's GCS may start anew
                logger.warning("a standby rank did not start: %s", failure_message(error))
                await asyncio.sleep(RESTOCK_S)
                continue
            changed: asyncio.Future[Any] = asyncio.ensure_future(self._stock.wait())
            lives = [standby.life for standby in self._standbys]
            await asyncio.wait([changed, *lives], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if not self._stock.is_set():
                await asyncio.sleep(RESTOCK_S)

    def _discard(self, standby: Standby) -> None:
        if standby in self._standbys:
            self._standbys.remove(standby)
            standby.release()
            self._launcher.end(standby.handle, standby.location)

    def _end(self, member: Member) -> None:
        self._new.discard(member)
        self._launcher.end(member.handle, member.location)
