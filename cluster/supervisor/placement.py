"""Places ranks: one bundle per node with all its ranks, numbered by (node, device), verified afterwards."""

import math
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.supervisor.capacity import (
    NodeCapacity,
    bundle,
    demand,
    large_enough,
    node_capacities,
    suffices,
    table,
)
from workers.config import RankConfig

MISSING_S = 2.0
"""Time in which nodes that are about to join may join."""
SHORTAGE_S = 4.0
"""Time in which resources of a server that has just ended come back."""
ANSWER_S = 1.0
"""Seconds in which a node accepts a connection."""

Node = Mapping[str, Any]  # an entry of ray.nodes()

LOCAL_CPU = 0.01  # Ray starts a process for a fraction of a CPU too
NODE_SHARE = 0.001  # of the resource that Ray gives each node by its address


class PlacementError(ValueError):
    """The ranks cannot be placed as the configuration demands."""


class NodeLostError(PlacementError):
    """The node of a rank does not come back, and no other node has node for the rank."""


@dataclass(frozen=True)
class RankLocation:
    """Where one rank runs. `address` is the IPv4 or IPv6 address of its node in the Ray cluster.

    started   start of the process, as of `processes.start_ticks`
    """

    rank: int
    node_id: str
    address: str
    pid: int
    gpu_ids: tuple[int | str, ...]
    started: int


def located(rank: int, facts: Mapping[str, Any]) -> RankLocation:
    """The location of a rank, from `RankActor.describe`."""
    gpu_ids = tuple(facts["gpu_ids"])
    return RankLocation(
        rank, facts["node_id"], facts["address"], facts["pid"], gpu_ids, facts["started"]
    )


def nodes() -> list[Node]:
    """The nodes of the Ray cluster, living or dead."""
    return list(ray.nodes())  # type: ignore[no-untyped-call]


def num_gpus() -> int:
    """GPUs of the Ray cluster."""
    return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]


def create(config: RankConfig, name: str) -> PlacementGroup:
    """Reserve one bundle per node. STRICT_SPREAD, because PACK does not fix which node holds which rank.

    Raises ValueError when another living placement group has the name.
    """
    needed = bundle(config, capacities(config))
    strategy = "STRICT_PACK" if config.dims.on_one_host else "STRICT_SPREAD"
    group: PlacementGroup = placement_group(
        [needed] * config.num_nodes, strategy=strategy, name=name, lifetime="detached"
    )
    return group


def find(name: str) -> PlacementGroup | None:
    """The placement group that `create` made in this namespace, if it lives."""
    try:
        group: PlacementGroup = ray.util.get_placement_group(name)
    except ValueError:
        return None
    return group


def create_beside(
    config: RankConfig, node: Node | None, name: str, *, joined: bool
) -> PlacementGroup:
    """Reserve the place of one more process on a node. A local Ray counts no CPUs for it."""
    resources = {"CPU": 1.0 if joined else LOCAL_CPU}
    if config.device == "cuda":
        resources["GPU"] = 1.0
    if node is not None:
        resources[f"node:{node['NodeManagerAddress']}"] = NODE_SHARE
    beside: PlacementGroup = placement_group(
        [resources], strategy="STRICT_PACK", name=name, lifetime="detached"
    )
    return beside


def create_on(config: RankConfig, address: str, name: str) -> PlacementGroup:
    """Reserve the place of the ranks of one node on the node of this address."""
    resources = demand(config) | {f"node:{address}": NODE_SHARE}
    group: PlacementGroup = placement_group(
        [resources], strategy="STRICT_PACK", name=name, lifetime="detached"
    )
    return group


def other_node(config: RankConfig, taken: Collection[str]) -> str | None:
    """Return the address of a node with node for the ranks of one node, beside the nodes with addresses `taken`.

    It has GPUs of the same kind as those nodes. None: there is no such node
    """
    found = capacities(config)
    kinds = {node.kind for node in found if node.address in taken}
    free = (node for node in found if not node.lack and node.address not in taken)
    return next((node.address for node in free if not kinds or node.kind in kinds), None)


def draining_nodes() -> dict[str, float]:
    """Return the seconds until the end of each node that Ray drains, by its id; infinite without a deadline."""
    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return {
        node_id: end_ms / 1000 - time.time() if end_ms else math.inf
        for node_id, end_ms in found.items()
    }


def no_room_beside(config: RankConfig) -> PlacementError:
    """The error of a node without node for one more process."""
    device = "GPU" if config.device == "cuda" else "CPU"
    return PlacementError(f"no free {device} for one more rank process on a node of the group")


def node_of(group: PlacementGroup, bundle: int) -> Node | None:
    """The living node of a bundle; None while Ray has none for it."""
    node_id = placement_group_table(group)["bundles_to_node_id"].get(bundle)
    return next((n for n in nodes() if n["Alive"] and n["NodeID"] == node_id), None)


def answers(node: Node) -> bool:
    """Whether the node's raylet accepts a connection. Ray itself notices a node without network after a minute."""
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, ANSWER_S).close()
    except OSError:
        return False
    return True


def check_gpus(config: RankConfig, nodes: Sequence[Node]) -> None:
    """Raise PlacementError if `nodes`, to which no node will be added, lack GPUs."""
    if config.device != "cuda":
        return
    found = int(max(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"]))
    if found < config.dims.ranks_per_node:
        raise PlacementError(
            f"cluster.device is cuda, which takes a GPU for each of {config.num_ranks} rank(s) (cluster.ranks), "
            f"and this machine has {found}; expected fewer ranks, or cluster.device auto or cpu"
        )


def capacities(config: RankConfig) -> list[NodeCapacity]:
    """What each node of the Ray cluster has free for the ranks."""
    free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return node_capacities(config, nodes(), free, draining_nodes())


def resized(config: RankConfig, *, num_ranks: int, num_nodes: int) -> RankConfig:
    """The configuration with another number of ranks; one rank has no all-to-all to choose."""
    changes: dict[str, object] = {"num_ranks": num_ranks, "num_nodes": num_nodes}
    if num_ranks == 1:
        changes["kernels"] = config.kernels.model_copy(update={"all2all": "auto"})
    return config.model_copy(update=changes)


def wait_ready(config: RankConfig, group: PlacementGroup, timeout_s: float) -> None:
    """Return when the group has its resources. Raises PlacementError with a line a node where they are not there.

    Nodes that are missing or too small are an error after MISSING_S, resources that other processes hold after
    SHORTAGE_S; a slow cluster with room gets `timeout_s`.
    """
    if group.wait(min(MISSING_S, timeout_s)):
        return
    if large_enough(config, capacities(config)) and group.wait(SHORTAGE_S - MISSING_S):
        return
    found = capacities(config)
    if suffices(config, found) and group.wait(max(0.0, timeout_s - SHORTAGE_S)):
        return
    if not group.wait(0):
        raise PlacementError(table(config, found))


def actor_options(config: RankConfig, group: PlacementGroup, bundle: int) -> dict[str, Any]:
    """Ray options of a process in a bundle. Ray does not restart a dead rank: it would be in no process group.

    Ray's GCS would keep a record of each of 100,000 calls, and heartbeats are calls: it grew by 1.5 MB a minute.
    """
    return {
        "num_cpus": 1,
        "num_gpus": 1 if config.device == "cuda" else 0,
        "max_restarts": 0,
        "max_concurrency": 1000,
        "enable_task_events": False,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group,
            placement_group_bundle_index=bundle,
        ),
    }


def verify(locations: list[RankLocation], config: RankConfig) -> None:
    """Raise PlacementError, with a table, unless each node holds one run of consecutive ranks."""
    count = config.dims.ranks_per_node
    nodes = [location.node_id for location in locations]
    runs = [nodes[start : start + count] for start in range(0, len(nodes), count)]
    heads = [run[0] for run in runs]
    if all(len(set(run)) == 1 for run in runs) and len(set(heads)) == len(heads):
        return
    table = "\n".join(
        f"  rank {location.rank}: {location.address} (node {location.node_id[:8]})"
        for location in locations
    )
    raise PlacementError(f"ranks did not land {count} to a node in order:\n{table}")


def visible_gpus(
    locations: Sequence[RankLocation], own: RankLocation, num_gpus: int = 0
) -> tuple[int | str, ...]:
    """The GPUs that a process sees, none on CPU: its own first, then those of the ranks of its node, then others.

    Ray would show the process its own GPU alone. The CUDA driver then would not see that memory shared between ranks
    lies on another GPU. A process sees the same GPUs for its life, also those on which ranks start later.

    num_gpus: of the node. Numbers that are no GPU of the machine end the list for CUDA, so they come last.
    """
    if not own.gpu_ids:
        return ()
    others = [other for other in locations if other.node_id == own.node_id and other is not own]
    ids = [gpu for location in (own, *others) for gpu in location.gpu_ids]
    if all(isinstance(gpu, int) for gpu in ids):
        ids += range(num_gpus)
    return tuple(dict.fromkeys(ids))


def gpus_of_node(node_id: str) -> int:
    """GPUs of a node."""
    found = (node["Resources"].get("GPU", 0) for node in nodes() if node["NodeID"] == node_id)
    return int(next(found, 0))
