"""Ranks that were started with different settings do not start: each of them raises the difference."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import rank_config
from workers.config import RankConfig
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess


def _start(rank: int, num_ranks: int, info: Any, configs: list[RankConfig], rendezvous: Any) -> str:
    """The error of a start with this rank's own settings; empty without one."""
    process = RankProcess(rank, configs[rank])
    try:
        Epoch(process, rendezvous, 30)
    except ValueError as error:
        return str(error)
    finally:
        process.close()
    return ""


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({}, ""),
        ({"scheduler": {"max_num_seqs": 8}}, "scheduler.max_num_seqs: rank 0 has 16, rank 1 has 8"),
        ({"overlap": {"num_ubatches": 3}}, "overlap.num_ubatches: rank 0 has 2, rank 1 has 3"),
    ],
    ids=["equal", "scheduler", "overlap"],
)
def test_a_group_of_different_settings_does_not_start(rank_pool, tmp_path: Path, section, named):
    from workers.rank.process_group import local_rendezvous

    make_checkpoint(
        tmp_path, num_layers=1, hidden_size=32, num_experts=4, num_experts_per_tok=2, head_dim=32
    )
    configs = [rank_config(tmp_path, 2), rank_config(tmp_path, 2, **section)]
    with local_rendezvous() as rendezvous:
        errors = rank_pool.run(_start, 2, configs, rendezvous, with_group=False, timeout_s=60)
    assert all(named in error and bool(error) == bool(named) for error in errors), errors
