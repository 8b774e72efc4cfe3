"""Starts the rank actors of a group in a placement group, or beside it on the same nodes, and ends them.

Knows nothing of what ranks do.
"""

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from cluster.supervisor import placement
from cluster.supervisor.placement import RankLocation
from cluster.supervisor.spares import Spares
from kernels.host import processes
from kernels.host.cuda_environment import MULTICAST_OFF
from workers.config import RankConfig
from workers.rank.actor import RankActor

MAX_PLACEMENT_S = 60.0
CAPACITY_WAIT_S = 5.0
"""Time in which Ray reserves the place of one more process, if its node has room."""
SPARE_DELAY_S = 1.0
"""Time of service before a spare process starts, which takes processor time from the ranks."""
# Variables that vendors' libraries read; they reach the ranks on every node, as in a process without Ray.
FORWARDED_ENVIRONMENT = (
    *("NCCL_", "NVSHMEM_", "TORCH_", "GLOO_", "OMP_", "MKL_", "CUDA_", "HF_"),
    *("TRITON_", "FLASHINFER_", "DG_", "EP_", "UCX_", "NIXL_", "XDG_CACHE_HOME"),
)
# Ray sets the devices of each actor. Ray writes variables to logs that all users read: a token travels in
# `RankActor.fetch_checkpoint`.
NOT_FORWARDED = frozenset({"CUDA_VISIBLE_DEVICES", "HF_TOKEN"})

NAMESPACE = "phalanx"  # of the names of actors and placement groups

RankHandle = Any  # ray.actor.ActorHandle of RankActor


class Launcher(Protocol):
    """RankLauncher, or a fake of tests."""

    async def launch(self, timeout_s: float) -> list[RankHandle]:
        """Create the rank actors."""

    def find(self) -> list[RankHandle]:
        """The actors that an earlier process of the supervisor has left, in any order."""

    def bundle_of(self, handle: RankHandle) -> int:
        """The bundle of the node that an actor runs on."""

    async def start(self, rank: int, config: RankConfig, bundle: int) -> RankHandle:
        """Create one more actor on the node of a bundle."""

    async def start_spares(self) -> None:
        """Let Ray start a process on each node before it is needed."""

    def has_capacity(self, bundle: int) -> bool:
        """Whether the bundle has a living node."""

    async def answers(self, bundle: int) -> bool:
        """Whether the bundle has a living node that can be reached."""

    async def draining(self) -> dict[int, float]:
        """Seconds until the end of each bundle's node, if Ray drains it."""

    async def move(self, bundle: int) -> bool:
        """Reserve another node for a bundle. Returns False if none has room."""

    def in_place(self, handle: RankHandle) -> bool:
        """Whether an actor runs where its bundle is now."""

    def end(self, handle: RankHandle, location: RankLocation | None) -> None:
        """End one actor. `location`: of its process, if known."""

    def kill(self) -> None:
        """End all actors."""


class RankLauncher:
    """The processes of one group. Each takes a place of a bundle, or beside it; one bundle is one node.

    The ranks are detached actors, so they outlive the process of the supervisor; each has a name by which `find` finds
    it again, with its bundle. So do the placement groups. When the supervisor's actor has ended for good, the ranks
    remove them.

    A bundle may move to another node: its place then is a placement group of its own, with the address in its name.

    name: unique among the groups of the Ray cluster, also among those that have ended.
    joined: whether Ray is a running cluster that `phalanx serve` joined; otherwise it is local and has no other nodes.
    spares: of the server; without them, the launcher has some of its own
    after: launchers of the groups that get their places before this one
    placed: set when the group has its places, or will not get them
    """

    def __init__(
        self,
        config: RankConfig,
        *,
        name: str,
        joined: bool,
        spares: Spares | None = None,
        after: Sequence["RankLauncher"] = (),
    ):
        self.placed = asyncio.Event()
        self._config = config
        self._name = name
        self._joined = joined
        self._after = list(after)
        self._placement_group: PlacementGroup | None = None
        self._environment: dict[str, str] = {}
        self._bundles: dict[RankHandle, int] = {}
        self._moved: dict[int, PlacementGroup] = {}  # by bundle: its place after it has left a node
        self._addresses: dict[int, str] = {}  # of the nodes of these places
        self._places: dict[RankHandle, PlacementGroup] = {}  # those of their bundles at their start
        self._beside: dict[RankHandle, PlacementGroup] = {}
        self._spares = Spares(joined=joined) if spares is None else spares

    async def launch(self, timeout_s: float) -> list[RankHandle]:
        """Create one actor per rank, in rank order. Raises PlacementError when the cluster has no room for them."""
        config = self._config
        for other in self._after:
            await other.placed.wait()
        try:
            await self._reserve(min(timeout_s, MAX_PLACEMENT_S))
        finally:
            self.placed.set()
        self._environment = rank_environment(self._config, joined=self._joined)
        return [
            await self.start(rank, config, config.dims.node(rank)) for rank in config.dims.ranks()
        ]

    async def _reserve(self, wait_s: float) -> None:
        if not self._joined:
            placement.check_gpus(self._config, placement.nodes())
        group = self._placement_group or placement.create(self._config, self._name)
        self._placement_group = group
        await asyncio.to_thread(placement.wait_ready, self._config, group, wait_s)

    def find(self) -> list[RankHandle]:
        """The living actors that an earlier process of this supervisor created, in any order.

        There are none without the placement group.
        """
        self._placement_group = placement.find(self._name)
        if self._placement_group is None:
            return []
        self._environment = rank_environment(self._config, joined=self._joined)
        self._spares.expect(self._node_ids(), self._environment)
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(self._actor_prefix):
                with suppress(ValueError):  # it has died since
                    self._take(actor["name"], ray.get_actor(actor["name"], NAMESPACE))
        if self._bundles:
            self.placed.set()
        return list(self._bundles)

    def _take(self, name: str, handle: RankHandle) -> None:
        number, _, own = name.removeprefix(self._actor_prefix).partition(":")
        self._bundles[handle] = bundle = int(number)
        address = own.partition("@")[2]
        moved = placement.find(self._name_on(address)) if address else None
        if moved is not None:
            self._moved[bundle], self._addresses[bundle] = moved, address
        self._places[handle] = self._group if moved is None else moved
        beside = placement.find(self._name_beside(own))
        if beside is not None:
            self._beside[handle] = beside

    def bundle_of(self, handle: RankHandle) -> int:
        """The bundle of the node that an actor runs on."""
        return self._bundles[handle]

    async def start(self, rank: int, config: RankConfig, bundle: int) -> RankHandle:
        """Create an actor on the node of `bundle`. Raises PlacementError when the node has no room for one more.

        rank: of its first epoch, or STANDBY.
        """
        own, beside = uuid.uuid4().hex, None
        place, index = self._place(bundle)
        if bundle in self._moved:
            own += "@" + self._addresses[bundle]
        if self._has_free_place(bundle):
            options = placement.actor_options(config, place, index)
        else:
            beside = await self._reserve_beside(config, bundle, own)
            options = placement.actor_options(config, beside, 0)
            options["num_cpus"] = beside.bundle_specs[0]["CPU"]
        name = f"{self._actor_prefix}{bundle}:{own}"
        options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
        actor_class: Any = ray.remote(RankActor)
        node = self._node(bundle) if self._spares.may_wait else None
        options |= self._spares.take(None if node is None else node["NodeID"], self._environment)
        handle = actor_class.options(**options).remote(rank, config)
        handle.follow.remote(ray.get_runtime_context().current_actor)
        self._bundles[handle], self._places[handle] = bundle, place
        if beside is not None:
            self._beside[handle] = beside
        return handle

    def _place(self, bundle: int) -> tuple[PlacementGroup, int]:
        """The placement group that has the place of `bundle` now, and its index there."""
        moved = self._moved.get(bundle)
        return (self._group, bundle) if moved is None else (moved, 0)

    def _node(self, bundle: int) -> placement.Node | None:
        return placement.node_of(*self._place(bundle))

    def _node_ids(self) -> list[str]:
        nodes = map(self._node, range(self._config.num_nodes))
        return [node["NodeID"] for node in nodes if node is not None]

    def _has_free_place(self, bundle: int) -> bool:
        inside = [handle for handle in self._bundles if handle not in self._beside]
        taken = [h for h in inside if self._bundles[h] == bundle and self.in_place(h)]
        return len(taken) < self._config.dims.ranks_per_node

    async def start_spares(self) -> None:
        """Let Ray start a process on each node of the ranks, in which the next actor there needs no start of Python."""
        await asyncio.sleep(SPARE_DELAY_S)
        await self._spares.start(self._node_ids(), self._environment)

    async def _reserve_beside(self, config: RankConfig, bundle: int, own: str) -> PlacementGroup:
        name = self._name_beside(own)
        beside = placement.create_beside(config, self._node(bundle), name, joined=self._joined)
        if not await self._is_reserved(beside):
            raise placement.no_room_beside(config)
        return beside

    async def _is_reserved(self, place: PlacementGroup) -> bool:
        """Return whether Ray reserves a place in time, and the group has not ended. Otherwise give the place back.

        `kill` and a caller that is cancelled do not give it back, because the launcher has no note of it yet.
        """
        reserved = False
        try:
            reserved = await asyncio.to_thread(place.wait, CAPACITY_WAIT_S)
            reserved = reserved and self._placement_group is not None  # `kill` came meanwhile
        finally:
            if not reserved and place not in self._places.values():
                remove_placement_group(place)
        return reserved

    @property
    def _actor_prefix(self) -> str:
        return f"rank:{self._name}:"

    def _name_on(self, address: str) -> str:
        return f"{self._name}:on:{address}"

    def _name_beside(self, own: str) -> str:
        return f"{self._name}:beside:{own}"

    def has_capacity(self, bundle: int) -> bool:
        """Whether the node of `bundle` lives, or Ray has found another node for the bundle."""
        return self._node(bundle) is not None

    async def answers(self, bundle: int) -> bool:
        """Whether the bundle has a node, and this node can be reached now. A local Ray has one node."""
        node = self._node(bundle)
        if node is None and bundle in self._moved:  # Ray may have a node for its first place
            remove_placement_group(self._moved.pop(bundle))
            node = self._node(bundle)
        if node is None or not self._joined:
            return node is not None
        return await asyncio.to_thread(placement.answers, node)

    async def draining(self) -> dict[int, float]:
        """Seconds until the end of each bundle's node, if Ray drains it; infinite without a deadline."""
        ends = await asyncio.to_thread(placement.draining_nodes) if self._joined else {}
        nodes = {b: self._node(b) for b in range(self._config.num_nodes)} if ends else {}
        return {
            bundle: ends[node["NodeID"]]
            for bundle, node in nodes.items()
            if node is not None and node["NodeID"] in ends
        }

    async def move(self, bundle: int) -> bool:
        """Reserve another node for a bundle; actors that run stay where they are. Returns False if no node has room.

        Ray keeps the reservation on the node that is left as long as the node lives.
        """
        nodes = map(self._node, range(self._config.num_nodes))
        taken = {node["NodeManagerAddress"] for node in nodes if node is not None}
        address = placement.other_node(self._config, taken)
        if address is None:
            return False
        name = self._name_on(address)
        place = placement.find(name) or placement.create_on(self._config, address, name)
        if not await self._is_reserved(place):
            return False
        self._moved[bundle], self._addresses[bundle] = place, address
        return True

    def in_place(self, handle: RankHandle) -> bool:
        """Whether an actor runs where its bundle is now."""
        bundle = self._bundles.get(handle)  # None: it was ended
        return bundle is not None and self._places[handle] == self._place(bundle)[0]

    def end(self, handle: RankHandle, location: RankLocation | None) -> None:
        """End an actor and free its place; one that was ended is ignored.

        Ray gives a process that does not react 5 s. A process on this node gets SIGKILL, so that its place and its
        memory are free at once.
        """
        if location is not None and location.node_id == ray.get_runtime_context().get_node_id():
            processes.kill(location.pid, location.started)
        ray.kill(handle)
        self._bundles.pop(handle, None)
        left = [self._beside.pop(handle, None)]
        place = self._places.pop(handle, None)
        present = (self._placement_group, *self._moved.values(), *self._places.values())
        left.append(None if place in present else place)
        for group in filter(None, left):
            remove_placement_group(group)

    def kill(self) -> None:
        """End the processes and give back their resources. Does nothing the second time."""
        self.placed.set()
        for handle in self._bundles:
            ray.kill(handle)
        groups = {*self._beside.values(), *self._moved.values(), *self._places.values()}
        groups.update(filter(None, [self._placement_group]))
        self._bundles, self._beside, self._moved, self._places = {}, {}, {}, {}
        self._placement_group = None
        for group in groups:
            remove_placement_group(group)

    @property
    def _group(self) -> PlacementGroup:
        assert self._placement_group is not None, "launch comes first"
        return self._placement_group


def rank_environment(config: RankConfig, *, joined: bool) -> dict[str, str]:
    """Variables of the ranks' processes that they do not inherit: all where Ray was joined.

    Ray starts a new process for a rank with variables of its own; without any it uses a process that waits.
    """
    forwarded = _forwarded_environment() if joined else {}
    if config.device != "cuda":
        return forwarded
    inherited = os.environ if len(placement.nodes()) == 1 else {}
    needed = {k: v for k, v in MULTICAST_OFF.items() if inherited.get(k) != v}
    return forwarded | needed


def _forwarded_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED_ENVIRONMENT) and name not in NOT_FORWARDED
    }


def rank_launchers(groups: Mapping[str, RankConfig], *, joined: bool) -> list[RankLauncher]:
    """The launchers of the groups of a server, by the names of their launchers, in this order.

    Groups with more ranks on a node get their places first: a small group may fit on nodes that a large one needs.
    """
    made: dict[str, RankLauncher] = {}
    spares = Spares(joined=joined)
    for name, config in sorted(
        groups.items(), key=lambda it: it[1].dims.ranks_per_node, reverse=True
    ):
        before = list(made.values())
        made[name] = RankLauncher(config, name=name, joined=joined, spares=spares, after=before)
    return [made[name] for name in groups]
