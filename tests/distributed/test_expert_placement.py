"""Engines under other maps of experts: requests get the tokens of experts in their order."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from workers.config import RankConfig
from workers.specs.expert_layout import ExpertLayout, LayerLayout
from workers.wire.request import EngineRequest

LAYERS, EXPERTS = 3, 6
SIZES: dict[str, Any] = {"hidden_size": 32, "num_experts": EXPERTS, "num_experts_per_tok": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("placement") / "model"
    return make_checkpoint(path, num_layers=LAYERS, head_dim=32, **SIZES)


def requests() -> list[EngineRequest]:
    seeded = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2}
    return [
        make_request("greedy", [3, 1, 4, 1, 5, 9], max_tokens=12),
        make_request("long", [*range(60)], max_tokens=8),
        make_request("seeded", [2, 7, 1, 8], max_tokens=12, **seeded),
    ]


def tokens(pool: Any, config: RankConfig) -> dict[str, list[int]]:
    """The tokens of all requests, on different ranks."""
    events = [
        Event(index, index % config.num_ranks, request) for index, request in enumerate(requests())
    ]
    results = run_engines(pool, config, events)
    return {name: got for result in results for name, got in result.tokens.items()}


def saved(folder: Path, checkpoint: Path, num_ranks: int, spare: int) -> Path:
    """A map that differs in each layer, planned by random loads."""
    config = rank_config(checkpoint, num_ranks)
    loads = np.random.default_rng(1).integers(1, 1000, (LAYERS, EXPERTS))
    base = ExpertLayout.of(config.dims.expert_map(EXPERTS, spare), range(LAYERS))
    planned = base.with_loads(dict(enumerate(loads))).planned()
    assert len({it.slots for it in planned.layers.values()}) > 1
    # The planner keeps what it may; here each rank has its experts backwards too.
    starts = planned.starts
    layers = {
        layer: LayerLayout(
            tuple(
                expert
                for start, end in pairwise(starts)
                for expert in reversed(it.slots[start:end])
            ),
            it.loads,
        )
        for layer, it in planned.layers.items()
    }
    path = folder / f"map-{num_ranks}-{spare}.json"
    ExpertLayout(EXPERTS, starts, layers).save(path)
    return path


@pytest.mark.parametrize(
    ("all2all", "spare", "copies"),
    [
        ("shm", 2, "auto"),
        ("torch_dist", 0, "auto"),
        ("allgather", 1, "all"),
        ("hierarchical", 1, "one"),
    ],
)
def test_tokens_do_not_depend_on_the_map(rank_pool, checkpoint, tmp_path, all2all, spare, copies):
    kernels = {"all2all": all2all}
    plain = tokens(rank_pool, rank_config(checkpoint, 2, kernels=kernels))
    path = saved(tmp_path, checkpoint, 2, spare)
    experts = {"redundant_slots": spare, "map": str(path), "copies": copies}
    assert tokens(rank_pool, rank_config(checkpoint, 2, kernels=kernels, experts=experts)) == plain
    if spare:  # copies in the order of the experts, without a map
        experts = {"redundant_slots": spare, "copies": copies}
        beside = rank_config(checkpoint, 2, kernels=kernels, experts=experts)
        assert tokens(rank_pool, beside) == plain


def test_a_map_of_other_ranks_is_planned_anew(rank_pool, checkpoint, tmp_path):
    """The file is of two ranks without redundant slots; three ranks have one each."""
    path = saved(tmp_path, checkpoint, 2, 0)
    experts = {"redundant_slots": 1, "map": str(path)}
    plain = tokens(rank_pool, rank_config(checkpoint, 3))
    assert tokens(rank_pool, rank_config(checkpoint, 3, experts=experts)) == plain
