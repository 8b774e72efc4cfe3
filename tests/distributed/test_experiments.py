"""Random weights and experts by a law: the same model and the same answers on any number of ranks."""

import random
from pathlib import Path

import pytest

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from tests.distributed.rank_pool import RankPool

NUM_REQUESTS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experiments") / "model"
    return make_checkpoint(path, num_layers=2, hidden_size=64, num_experts=10, weights=False)


def answers(pool: RankPool, folder: Path, ranks: int, routing: dict) -> dict[str, list[int]]:
    config = rank_config(folder, ranks, model={"weights": "dummy", "routing": routing})
    source = random.Random(3)
    events = []
    for index in range(NUM_REQUESTS):
        prompt = [source.randrange(256) for _ in range(source.randrange(1, 60))]
        events.append(Event(index // 2, index % ranks, make_request(str(index), prompt)))
    results = run_engines(pool, config, events)
    assert not any(result.errors for result in results)
    return {name: ids for result in results for name, ids in result.tokens.items()}


@pytest.mark.parametrize("routing", [{}, {"kind": "uniform"}, {"kind": "zipf", "s": 1.2}])
def test_any_number_of_ranks_gives_the_same_answers(rank_pool, folder, routing):
    alone = answers(rank_pool, folder, 1, routing)
    assert len(alone) == NUM_REQUESTS
    assert len({tuple(ids) for ids in alone.values()}) == NUM_REQUESTS
    assert answers(rank_pool, folder, 3, routing) == alone


def test_balanced_runs_on_several_ranks(rank_pool, folder):
    found = answers(rank_pool, folder, 2, {"kind": "balanced"})
    assert all(len(ids) == 16 for ids in found.values()) and len(found) == NUM_REQUESTS
