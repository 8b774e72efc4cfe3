"""Which nodes have room for ranks, and the error that lists the nodes where too few have."""

from typing import Any

import pytest

from cluster.supervisor.capacity import bundle, node_capacities, suffices, table
from cluster.supervisor.placement import PlacementError, wait_ready
from kernels.interface.config import KernelsConfig
from workers.config import CacheConfig, ModelSection, RankConfig, SchedulerConfig


def config(ranks: int, nodes: int, device: str = "cuda") -> RankConfig:
    return RankConfig(
        model=ModelSection(path="nowhere"),
        scheduler=SchedulerConfig(),
        cache=CacheConfig(),
        kernels=KernelsConfig(),
        num_ranks=ranks,
        num_nodes=nodes,
        device=device,
        threads=1,
        vote_timeout_s=1.0,
    )


def node(name: str, gpus: int, kind: str = "H100", alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": 16.0} | (
        {"GPU": float(gpus), f"accelerator_type:{kind}": 1.0} if gpus else {}
    )
    return {
        "NodeID": f"id-{name}",
        "NodeManagerHostname": name,
        "NodeManagerAddress": f"10.0.0.{name}",
        "Alive": alive,
        "Resources": resources if alive else {},
    }


def free_of(nodes: list[dict[str, Any]], **taken: float) -> dict[str, dict[str, float]]:
    """All resources of living nodes, less `taken` GPUs by the node's name."""
    found = {}
    for entry in nodes:
        if entry["Alive"]:
            free = dict(entry["Resources"])
            if (gone := taken.get(f"n{entry['NodeManagerHostname']}", 0)) > 0:
                free["GPU"] -= gone
            found[entry["NodeID"]] = free
    return found


def test_missing_and_taken_nodes_stand_in_the_table_line_by_line() -> None:
    nodes = [node("1", 8), node("2", 8), node("3", 0), node("4", 4), node("5", 8, alive=False)]
    wanted = config(24, 3)
    found = node_capacities(wanted, nodes, free_of(nodes, n2=7))
    assert not suffices(wanted, found)
    lines = table(wanted, found).splitlines()
    assert "24 rank(s) on 3 node(s) (cluster.ranks, cluster.nodes)" in lines[0]
    assert "8 free CPU(s) and 8 free GPU(s), which 1 of 3 node(s) have" in lines[0]
    assert [line.split() for line in lines[2:7]] == [
        ["1", "10.0.0.1", "16", "of", "16", "8", "of", "8", "room"],
        ["2", "10.0.0.2", "16", "of", "16", "1", "of", "8", "7", "GPU(s)", "taken"],
        ["3", "10.0.0.3", "16", "of", "16", "0", "of", "0", "has", "no", "GPU"],
        ["4", "10.0.0.4", "16", "of", "16", "4", "of", "4", "has", "4", "GPU(s)"],
        ["5", "10.0.0.5", "-", "-", "dead"],
    ]


def test_a_dead_node_whose_address_lives_again_is_not_listed() -> None:
    nodes = [node("1", 0, alive=False), node("1", 0)]
    wanted = config(1, 1, "cpu")
    found = node_capacities(wanted, nodes, free_of(nodes))
    assert [node.lack for node in found] == [""] and suffices(wanted, found)


def test_gpus_of_one_kind_take_the_ranks() -> None:
    nodes = [node("1", 8), node("2", 8, "A100"), node("3", 8)]
    found = node_capacities(config(16, 2), nodes, free_of(nodes))
    assert suffices(config(16, 2), found)
    assert bundle(config(16, 2), found) == {
        "CPU": 8.0,
        "GPU": 8.0,
        "accelerator_type:H100": 0.001,
    }
    mixed = node_capacities(config(24, 3), nodes, free_of(nodes))
    assert not suffices(config(24, 3), mixed)
    assert "A100, not H100 as elsewhere" in table(config(24, 3), mixed)


def test_equal_gpus_need_no_kind() -> None:
    nodes = [node("1", 8), node("2", 8), node("3", 0)]
    found = node_capacities(config(16, 2), nodes, free_of(nodes))
    assert bundle(config(16, 2), found) == {"CPU": 8.0, "GPU": 8.0}
    assert bundle(config(2, 2, "cpu"), found) == {"CPU": 1.0}


class FakePlacementGroup:
    """Gets its resources at call `ready_at` of `wait`; notes the times it was given."""

    def __init__(self, ready_at: int):
        self._ready_at = ready_at
        self.waits: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return len(self.waits) >= self._ready_at


@pytest.mark.parametrize(
    ("taken", "ready_at", "waits"),
    [
        (0, 1, [2.0]),  # placed at once
        (0, 3, [2.0, 2.0, 56.0]),  # a slow cluster with room gets the whole time
        (8, 3, [2.0, 2.0, 0]),  # the resources came back while the table was made
    ],
)
def test_ranks_with_room_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, taken: int, ready_at: int, waits: list[float]
) -> None:
    nodes = [node("1", 8)]
    wanted = config(8, 1)
    found = node_capacities(wanted, nodes, free_of(nodes, n1=taken))
    monkeypatch.setattr("cluster.supervisor.placement.capacities", lambda config: found)
    group = FakePlacementGroup(ready_at)
    wait_ready(wanted, group, 60.0)
    assert group.waits == waits


@pytest.mark.parametrize(
    ("gpus", "taken", "waits", "expected"),
    [
        (8, 3, [2.0, 2.0, 0], r"3 GPU\(s\) taken"),  # which may come back
        (4, 0, [2.0, 0], r"has 4 GPU\(s\)"),
    ],
)
def test_a_shortage_is_an_error_within_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, gpus: int, taken: int, waits: list[float], expected: str
) -> None:
    """Six of them are for the start of Python and Ray, and the end."""
    nodes = [node("1", gpus)]
    wanted = config(8, 1)
    found = node_capacities(wanted, nodes, free_of(nodes, n1=taken))
    monkeypatch.setattr("cluster.supervisor.placement.capacities", lambda config: found)
    group = FakePlacementGroup(99)
    with pytest.raises(PlacementError, match=expected):
        wait_ready(wanted, group, 600.0)
    assert group.waits == waits
