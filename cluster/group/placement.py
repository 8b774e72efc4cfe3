"""Where ranks go: one bundle a node with all its ranks, numbered by (node, device), verified afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.config import RankConfig


class PlacementError(ValueError):
    """The ranks cannot be placed as the configuration asks."""


@dataclass(frozen=True)
class RankLocation:
    """Where one rank landed."""

    rank: int
    node_id: str
    host: str
    pid: int
    gpu_ids: tuple[int | str, ...]


def create(config: RankConfig) -> PlacementGroup:
    """One bundle per node. STRICT_SPREAD, since PACK promises nothing about which node holds which rank."""
    count = config.dims.ranks_per_node
    bundle = {"CPU": float(count)}
    if config.device == "cuda":
        bundle["GPU"] = float(count)
    strategy = "STRICT_PACK" if config.dims.on_one_host else "STRICT_SPREAD"
    return placement_group([bundle] * config.num_nodes, strategy=strategy)


def check_gpus(config: RankConfig, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise PlacementError where a Ray that gets no further nodes lacks GPUs; `nodes` as of `ray.nodes`."""
    if config.device != "cuda":
        return
    found = int(max(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"]))
    if found < config.dims.ranks_per_node:
        raise PlacementError(
            f"cluster.device is cuda, which takes a GPU for each of {config.num_ranks} rank(s) (cluster.ranks), "
            f"and this machine has {found}; expected fewer ranks, or cluster.device auto or cpu"
        )


def check_ready(ready: bool, config: RankConfig, timeout_s: float) -> None:
    """Raise PlacementError with what was asked and what the cluster has, when the group is not ready."""
    if ready:
        return
    device = "GPU" if config.device == "cuda" else "CPU"
    have = [
        f"  {node['NodeManagerHostname']}: {node['Resources'].get(device, 0):g} {device}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    raise PlacementError(
        f"no room for {config.num_ranks} ranks within {timeout_s:g} s: needs {config.num_nodes} "
        f"node(s) with {config.dims.ranks_per_node} free {device}(s) each (cluster.ranks, cluster.nodes); "
        "the cluster has\n" + "\n".join(have)
    )


def actor_options(config: RankConfig, group: PlacementGroup, rank: int) -> dict[str, Any]:
    """Ray options of one rank. A rank that dies is not restarted alone: it would have no communicator."""
    return {
        "num_cpus": 1,
        "num_gpus": 1 if config.device == "cuda" else 0,
        "max_restarts": 0,
        "max_concurrency": 1000,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group,
            placement_group_bundle_index=config.dims.node(rank),
        ),
    }


def verify(locations: list[RankLocation], config: RankConfig) -> None:
    """Each node must hold one run of consecutive ranks. Raises PlacementError with the table."""
    count = config.dims.ranks_per_node
    runs = [
        [locations[rank].node_id for rank in config.dims.ranks_of_node(node)]
        for node in range(config.num_nodes)
    ]
    heads = [run[0] for run in runs]
    if all(len(set(run)) == 1 for run in runs) and len(set(heads)) == len(heads):
        return
    table = "\n".join(
        f"  rank {location.rank}: {location.host} (node {location.node_id[:8]})"
        for location in locations
    )
    raise PlacementError(f"ranks did not land {count} to a node in order:\n{table}")


def visible_gpus(locations: Sequence[RankLocation], rank: int) -> tuple[int | str, ...]:
    """The GPUs that a rank's process is to see, none on CPU: its own, then those of the ranks beside it.

    Ray shows it its own alone, and then the driver does not know that memory which ranks share lies on another GPU.
    """
    own = locations[rank]
    beside = [other for other in locations if other.node_id == own.node_id and other is not own]
    return tuple(gpu for location in (own, *beside) for gpu in location.gpu_ids)
