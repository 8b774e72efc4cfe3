"""The own times of whole engines name the rank that computes slowly, though all ranks take equally long."""

import time
from typing import Any
from unittest.mock import patch

import pytest

from cluster.supervisor.slow_ranks import MIN_OWN_SHARE, slowdowns
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
    run_rank,
)
from tests.distributed.reference import write_checkpoint

# Of each layer with experts: far more than a rank computes where others share its cores.
SLOW_S = 0.1


def run_slowly(rank: int, *args: Any) -> RankResult:
    """Run rank 1 with experts that take long."""
    from workers.layers.moe import MoeBlock

    forward = MoeBlock.forward

    def slowly(self: MoeBlock, *args: Any) -> Any:
        time.sleep(SLOW_S if rank == 1 else 0)
        return forward(self, *args)

    with patch.object(MoeBlock, "forward", slowly):
        return run_rank(rank, *args)


@pytest.mark.parametrize("all2all", ["shm", "torch_dist", "hierarchical"])
def test_the_rank_that_does_not_wait_is_slow(rank_pool, tmp_path, all2all):
    checkpoint = write_checkpoint(tmp_path / "model")
    config = rank_config(checkpoint, 2, kernels={"all2all": all2all})
    requests = [make_request(name, [1, 2, 3], max_tokens=4) for name in ("a", "b")]
    events = [Event(0, rank, request) for rank, request in enumerate(requests)]
    results = run_engines(rank_pool, config, events, function=run_slowly)
    works = [result.work for result in results]
    assert works[0].steps == works[1].steps > 3
    assert slowdowns(works)[1] > 3, works
    assert works[1].own_s > MIN_OWN_SHARE * works[1].total_s
    assert works[0].own_s < MIN_OWN_SHARE * works[0].total_s, works
