"""Which nodes of a Ray cluster have capacity for ranks, and the table of the error when too few have.

Knows nothing of placement groups. Entries of nodes and of free resources are those that Ray returns.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workers.config import RankConfig

ACCELERATOR = "accelerator_type:"
DEAD = "dead"


@dataclass(frozen=True)
class NodeCapacity:
    """One node. `total` and `free`: its CPUs and GPUs; `kind`: the GPU's model as Ray names it, "" without one.

    lack: why the node can take no ranks, "" if it can
    """

    name: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    kind: str
    lack: str


def demand(config: RankConfig) -> dict[str, float]:
    """Return the resources that the ranks of one node take."""
    count = float(config.dims.ranks_per_node)
    return {"CPU": count, "GPU": count} if config.device == "cuda" else {"CPU": count}


def node_capacities(
    config: RankConfig,
    nodes: Sequence[Mapping[str, Any]],
    free: Mapping[str, Mapping[str, float]],
    draining: Collection[str] = (),
) -> list[NodeCapacity]:
    """Judge every node. Dead nodes are listed unless a living node has their address.

    draining: ids of nodes that Ray drains

    Ranks compute in lockstep, so GPUs of one kind take them: the kind that most nodes with room have.
    """
    alive = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    listed = [node for node in nodes if node["Alive"] or node["NodeManagerAddress"] not in alive]
    found = [_capacity(node, free.get(node["NodeID"], {}), demand(config)) for node in listed]
    found = [
        _with_lack(one, "draining") if node["NodeID"] in draining and not one.lack else one
        for node, one in zip(listed, found, strict=True)
    ]
    kinds = Counter(node.kind for node in found if not node.lack)
    if len(kinds) < 2 or config.device != "cuda":
        return found
    common = kinds.most_common(1)[0][0]
    return [
        node
        if node.lack or node.kind == common
        else _with_lack(node, f"{node.kind}, not {common} as elsewhere")
        for node in found
    ]


def suffices(config: RankConfig, capacities: Sequence[NodeCapacity]) -> bool:
    """Whether the ranks have room."""
    return sum(not node.lack for node in capacities) >= config.num_nodes


def large_enough(config: RankConfig, capacities: Sequence[NodeCapacity]) -> bool:
    """Whether the ranks would have room if nothing else ran on the nodes."""
    needed = demand(config)
    fitting = (
        node.lack != DEAD and all(node.total[name] >= needed[name] for name in needed)
        for node in capacities
    )
    return sum(fitting) >= config.num_nodes


def bundle(config: RankConfig, capacities: Sequence[NodeCapacity]) -> dict[str, float]:
    """Return the resources to reserve on each node; where GPUs of several kinds are, of one kind alone."""
    needed = demand(config)
    kinds = {node.kind for node in capacities if node.kind}
    if config.device == "cuda" and len(kinds) > 1:
        needed |= {f"{ACCELERATOR}{node.kind}": 0.001 for node in capacities if not node.lack}
    return needed


def table(config: RankConfig, capacities: Sequence[NodeCapacity]) -> str:
    """Return the message of the error: the demand, a line a node, and what to do."""
    resources = list(demand(config))
    needed = " and ".join(f"{config.dims.ranks_per_node} free {name}(s)" for name in resources)
    rows = [("node", "address", *(f"free {name}s" for name in resources), "")]
    rows += [
        (node.name, node.address, *_counts(node, resources), node.lack or "room")
        for node in capacities
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    found = sum(not node.lack for node in capacities)
    return "\n".join(
        (
            f"no capacity for {config.num_ranks} rank(s) on {config.num_nodes} node(s) (cluster.ranks, cluster.nodes): "
            f"each node needs {needed}, which {found} of {config.num_nodes} node(s) have",
            *lines,
            "start the missing nodes, end what holds the resources (`ray status`), or lower cluster.ranks",
        )
    )


def _capacity(
    node: Mapping[str, Any], free: Mapping[str, float], needed: Mapping[str, float]
) -> NodeCapacity:
    total = node["Resources"]
    kind = next((name for name in total if name.startswith(ACCELERATOR)), "")
    return NodeCapacity(
        node["NodeManagerHostname"],
        node["NodeManagerAddress"],
        {name: total.get(name, 0.0) for name in needed},
        {name: free.get(name, 0.0) for name in needed},
        kind.removeprefix(ACCELERATOR),
        _lack(node, free, needed),
    )


def _lack(node: Mapping[str, Any], free: Mapping[str, float], needed: Mapping[str, float]) -> str:
    if not node["Alive"]:
        return DEAD
    lacks = []
    for name, count in needed.items():
        has, unused = node["Resources"].get(name, 0.0), free.get(name, 0.0)
        if has < count:
            lacks.append(f"has {has:g} {name}(s)" if has else f"has no {name}")
        elif unused < count:
            lacks.append(f"{has - unused:g} {name}(s) taken")
    return ", ".join(lacks)


def _with_lack(node: NodeCapacity, lack: str) -> NodeCapacity:
    return replace(node, lack=lack)


def _counts(node: NodeCapacity, resources: Sequence[str]) -> list[str]:
    if node.lack == DEAD:
        return ["-" for _ in resources]
    return [f"{node.free[name]:g} of {node.total[name]:g}" for name in resources]
