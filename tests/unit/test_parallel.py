"""The layout of a group's ranks over hosts and experts."""

import subprocess
import sys

import pytest

from workers.parallel import ParallelDims


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(1, 1), (3, 1), (4, 2), (8, 2), (6, 3)])
def test_every_rank_has_one_place(num_ranks: int, num_nodes: int) -> None:
    dims = ParallelDims(num_ranks=num_ranks, num_nodes=num_nodes)
    places = [(dims.node(rank), dims.local_rank(rank)) for rank in dims.ranks()]
    assert places == [
        (node, local) for node in range(num_nodes) for local in range(dims.ranks_per_node)
    ]
    for rank in dims.ranks():
        assert rank in dims.ranks_of_node(dims.node(rank))
        assert sorted([rank, *dims.peers(rank)]) == list(dims.ranks())
    assert dims.alone == (num_ranks == 1) and dims.on_one_host == (num_nodes == 1)


def test_values_of_peers_and_of_all() -> None:
    dims = ParallelDims(num_ranks=3)
    assert dims.of_peers(1, "abc") == ["a", "c"]
    assert dims.equal_counts(7) == (7, 7, 7)
    expert_map = dims.expert_map(8)
    assert [list(expert_map.experts_of(rank)) for rank in dims.ranks()] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_ranks": 3, "num_nodes": 2}, "3 ranks cannot be spread over 2 nodes"),
        ({"num_ranks": 0}, "0 ranks"),
        ({"num_ranks": 2, "tensor_size": 2}, "tensor_size is 2; only 1 is implemented"),
    ],
)
def test_impossible_layouts_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelDims(**values)


def test_it_needs_no_torch() -> None:
    code = "import sys, workers.parallel; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
