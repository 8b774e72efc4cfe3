"""A machine without the GPUs that the ranks need is told so at once; which GPUs a rank sees."""

import pytest

from cluster.supervisor.placement import (
    PlacementError,
    RankLocation,
    check_gpus,
    verify,
    visible_gpus,
)
from kernels.interface.config import KernelsConfig
from workers.config import CacheConfig, ModelSection, RankConfig, SchedulerConfig


def config(num_ranks: int, device: str, num_nodes: int = 1) -> RankConfig:
    return RankConfig(
        model=ModelSection(path="nowhere"),
        scheduler=SchedulerConfig(),
        cache=CacheConfig(),
        kernels=KernelsConfig(),
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        device=device,
        threads=1,
        vote_timeout_s=1.0,
    )


def node(gpus: int, alive: bool = True) -> dict:
    resources = {"CPU": 4.0} | ({"GPU": float(gpus)} if gpus else {})
    return {"Alive": alive, "Resources": resources}


@pytest.mark.parametrize(("nodes", "found"), [([node(0)], 0), ([node(2), node(8, False)], 2)])
def test_too_few(nodes: list[dict], found: int) -> None:
    with pytest.raises(PlacementError) as caught:
        check_gpus(config(4, "cuda"), nodes)
    says = str(caught.value)
    assert "each of 4 rank(s) (cluster.ranks)" in says and f"this machine has {found};" in says


def test_enough() -> None:
    check_gpus(config(4, "cuda"), [node(4)])
    check_gpus(config(4, "cpu"), [node(0)])


def test_a_rank_sees_its_own_gpu_first() -> None:
    def at(rank: int, node_id: str, *gpus: int | str) -> RankLocation:
        return RankLocation(rank, node_id, "host", 1, gpus, 0)

    locations = [at(0, "a", 5), at(1, "a", 4), at(2, "b", "GPU-x"), at(3, "b", "GPU-y")]
    seen = [visible_gpus(locations, own) for own in locations]
    assert seen == [(5, 4), (4, 5), ("GPU-x", "GPU-y"), ("GPU-y", "GPU-x")]
    later = visible_gpus(locations, locations[0], num_gpus=8)
    assert later == (5, 4, 0, 1, 2, 3, 6, 7), "those of ranks that start later"
    assert visible_gpus(locations, locations[2], num_gpus=8) == ("GPU-x", "GPU-y")
    assert visible_gpus([at(0, "a"), at(1, "a")], at(1, "a"), 4) == (), "on CPU nothing is changed"


@pytest.mark.parametrize(
    ("nodes", "fits"),
    [("aabb", True), ("bbaa", True), ("abab", False), ("abbb", False), ("aaaa", False)],
)
def test_each_node_has_one_run_of_ranks(nodes: str, fits: bool) -> None:
    locations = [RankLocation(i, node, f"10.0.0.{i}", 1, (), 0) for i, node in enumerate(nodes)]
    if fits:
        verify(locations, config(4, "cpu", num_nodes=2))
        return
    with pytest.raises(PlacementError, match="did not land 2 to a node") as caught:
        verify(locations, config(4, "cpu", num_nodes=2))
    assert f"rank 3: 10.0.0.3 (node {nodes[3]})" in str(caught.value)
