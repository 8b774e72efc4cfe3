"""Which nodes of a Ray cluster have room for ranks, and the table of the error when too few have.

Knows nothing of placement groups. Entries of nodes and of free resources are those that Ray returns.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.config import RankConfig

ACCELERATOR = "accelerator_type:"
DEAD = "dead"


@dataclass(frozen=True)
class NodeRoom:
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


def node_rooms(
    config: RankConfig,
    nodes: Sequence[Mapping[str, Any]],
    free: Mapping[str, Mapping[str, float]],
    draining: Collection[str] = (),
) -> list[NodeRoom]:
    """Judge every node. Dead nodes are listed unless a living node has their address.

    draining: ids of nodes that Ray drains

    Ranks compute in lockstep, so GPUs of one kind take them: the kind that most nodes with room have.
    """
    alive = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    listed = [node for node in nodes if node["Alive"] or node["NodeManagerAddress"] not in alive]
    rooms = [_room(node, free.get(node["NodeID"], {}), demand(config)) for node in listed]
    rooms = [
        _with_lack(room, "draining") if node["NodeID"] in draining and not room.lack else room
        for node, room in zip(listed, rooms, strict=True)
    ]
    kinds = Counter(room.kind for room in rooms if not room.lack)
    if len(kinds) < 2 or config.device != "cuda":
        return rooms
    common = kinds.most_common(1)[0][0]
    return [
        room
        if room.lack or room.kind == common
        else _with_lack(room, f"{room.kind}, not {common} as elsewhere")
        for room in rooms
    ]


def suffices(config: RankConfig, rooms: Sequence[NodeRoom]) -> bool:
    """Whether the ranks have room."""
    return sum(not room.lack for room in rooms) >= config.num_nodes


def large_enough(config: RankConfig, rooms: Sequence[NodeRoom]) -> bool:
    """Whether the ranks would have room if nothing else ran on the nodes."""
    needed = demand(config)
    fitting = (
        room.lack != DEAD and all(room.total[name] >= needed[name] for name in needed)
        for room in rooms
    )
    return sum(fitting) >= config.num_nodes


def bundle(config: RankConfig, rooms: Sequence[NodeRoom]) -> dict[str, float]:
    """Return the resources to reserve on each node; where GPUs of several kinds are, of one kind alone."""
    needed = demand(config)
    kinds = {room.kind for room in rooms if room.kind}
    if config.device == "cuda" and len(kinds) > 1:
        needed |= {f"{ACCELERATOR}{room.kind}": 0.001 for room in rooms if not room.lack}
    return needed


def table(config: RankConfig, rooms: Sequence[NodeRoom]) -> str:
    """Return the message of the error: the demand, a line a node, and what to do."""
    resources = list(demand(config))
    needed = " and ".join(f"{config.dims.ranks_per_node} free {name}(s)" for name in resources)
    rows = [("node", "address", *(f"free {name}s" for name in resources), "")]
    rows += [
        (room.name, room.address, *_counts(room, resources), room.lack or "room") for room in rooms
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    found = sum(not room.lack for room in rooms)
    return "\n".join(
        (
            f"no room for {config.num_ranks} rank(s) on {config.num_nodes} node(s) (cluster.ranks, cluster.nodes): "
            f"each node needs {needed}, which {found} of {config.num_nodes} node(s) have",
            *lines,
            "start the missing nodes, end what holds the resources (`ray status`), or lower cluster.ranks",
        )
    )


def _room(
    node: Mapping[str, Any], free: Mapping[str, float], needed: Mapping[str, float]
) -> NodeRoom:
    total = node["Resources"]
    kind = next((name for name in total if name.startswith(ACCELERATOR)), "")
    return NodeRoom(
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


def _with_lack(room: NodeRoom, lack: str) -> NodeRoom:
    return NodeRoom(room.name, room.address, room.total, room.free, room.kind, lack)


def _counts(room: NodeRoom, resources: Sequence[str]) -> list[str]:
    if room.lack == DEAD:
        return ["-" for _ in resources]
    return [f"{room.free[name]:g} of {room.total[name]:g}" for name in resources]
