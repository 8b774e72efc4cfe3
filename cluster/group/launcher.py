"""Creates the rank actors of a group in a placement group, and ends them. Knows nothing of what ranks do."""

import asyncio
import os
import uuid
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from cluster.group import placement
from kernels.host.cuda_environment import MULTICAST_OFF
from workers.config import RankConfig
from workers.rank.actor import RankActor

MAX_PLACEMENT_S = 60.0
# Variables that vendors' libraries read; they reach the ranks on every node, as in a process without Ray.
FORWARDED_ENVIRONMENT = (
    *("NCCL_", "NVSHMEM_", "TORCH_", "GLOO_", "OMP_", "MKL_", "CUDA_", "HF_"),
    *("TRITON_", "FLASHINFER_", "DG_", "EP_", "XDG_CACHE_HOME"),
)
NOT_FORWARDED = frozenset({"CUDA_VISIBLE_DEVICES"})  # Ray sets it for each actor

NAMESPACE = "phalanx"  # of the names of actors and placement groups

RankHandle = Any  # ray.actor.ActorHandle of RankActor


class Launcher(Protocol):
    """RankLauncher, or a fake of tests."""

    async def launch(self, timeout_s: float) -> list[RankHandle]:
        """Create the rank actors."""

    def find(self) -> list[RankHandle]:
        """The actors that an earlier process of the supervisor has left, in any order."""

    def adopt(self, seats: dict[int, RankHandle]) -> list[RankHandle]:
        """Keep the found actors in `seats`, end the other ones, and create those of missing ranks."""

    async def replace(self, ranks: Collection[int]) -> list[RankHandle]:
        """End the actors of `ranks` and create new ones; returns the actors of all ranks."""

    def kill(self) -> None:
        """End them."""


class RankLauncher:
    """The processes of one group.

    The ranks are detached actors, so they outlive the process of the supervisor; each has a name by which `find` finds
    it again. So does the placement group. When the supervisor's actor has ended for good, the ranks remove it.

    name: unique among the groups of the Ray cluster, also among those that have ended.
    joined: whether Ray is a running cluster that `phalanx serve` joined; otherwise it is local and has no other nodes.
    """

    def __init__(self, config: RankConfig, *, name: str, joined: bool):
        self._config = config
        self._name = name
        self._joined = joined
        self._placement_group: PlacementGroup | None = None
        self._environment: dict[str, str] = {}
        self._ranks: list[RankHandle] = []
        self._found: list[RankHandle] = []

    async def launch(self, timeout_s: float) -> list[RankHandle]:
        """Create one actor per rank, in rank order. Raises PlacementError when the cluster has no room for them."""
        config = self._config
        if not self._joined:
            placement.check_gpus(config, placement.nodes())
        group = self._placement_group or placement.create(config, self._name)
        self._placement_group = group
        wait_s = min(timeout_s, MAX_PLACEMENT_S)
        await asyncio.to_thread(placement.wait_ready, config, group, wait_s)
        self._environment = self._rank_environment()
        self._ranks = [self._create(rank) for rank in range(config.num_ranks)]
        return self._ranks

    def find(self) -> list[RankHandle]:
        """The living actors that an earlier process of this supervisor created, in any order.

        There are none without the placement group.
        """
        self._placement_group = placement.find(self._name)
        if self._placement_group is None:
            return []
        self._found = []
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(self._actor_prefix):
                with suppress(ValueError):  # it has died since
                    self._found.append(ray.get_actor(actor["name"], NAMESPACE))
        return self._found

    def adopt(self, seats: dict[int, RankHandle]) -> list[RankHandle]:
        """Keep the found actors in `seats`, end the other ones, and create those of missing ranks."""
        for actor in self._found:
            if actor not in seats.values():
                ray.kill(actor)
        self._environment = self._rank_environment()
        self._ranks = [
            seats.get(rank) or self._create(rank) for rank in range(self._config.num_ranks)
        ]
        return self._ranks

    async def replace(self, ranks: Collection[int]) -> list[RankHandle]:
        """End the actors of `ranks` and create new ones in their places; returns the actors of all ranks."""
        for rank in ranks:
            ray.kill(self._ranks[rank])
        self._ranks = [
            self._create(rank) if rank in ranks else actor for rank, actor in enumerate(self._ranks)
        ]
        return self._ranks

    def _create(self, rank: int) -> RankHandle:
        assert self._placement_group is not None, "launch comes first"
        actor_class: Any = ray.remote(RankActor)
        options = placement.actor_options(self._config, self._placement_group, rank)
        name = f"{self._actor_prefix}{uuid.uuid4().hex}"
        options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
        if self._environment:
            options["runtime_env"] = {"env_vars": self._environment}
        actor = actor_class.options(**options).remote(rank, self._config)
        actor.follow.remote(ray.get_runtime_context().current_actor)
        return actor

    @property
    def _actor_prefix(self) -> str:
        return f"rank:{self._name}:"

    def kill(self) -> None:
        """End the processes and give back their resources. Does nothing the second time."""
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []
        if self._placement_group is not None:
            remove_placement_group(self._placement_group)
            self._placement_group = None

    def _rank_environment(self) -> dict[str, str]:
        """Variables of the ranks' processes that they do not inherit: all where Ray was joined.

        Ray starts a new process for a rank with variables of its own; without any it uses a process that waits.
        """
        forwarded = _forwarded_environment() if self._joined else {}
        if self._config.device != "cuda":
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
