"""The pool itself: results and exceptions come back, and it survives hung and dead ranks."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.rank_pool import JOIN_FAILED, RankError, RankPool


def _sum(rank, num_ranks, info, offset):
    x = torch.tensor([rank + offset])
    dist.all_reduce(x)
    return x.item(), os.getpid()


def _raise_on(rank, num_ranks, info, bad):
    if rank == bad:
        raise ValueError(f"rank {rank} is bad")
    dist.barrier()


def _own_rank(rank, num_ranks, info):
    return rank


def _hang(rank, num_ranks, info):
    time.sleep(60 if rank == 1 else 0)


def _die(rank, num_ranks, info):
    os._exit(3) if rank == 0 else None


def test_results_and_reuse(rank_pool: RankPool):
    first = rank_pool.run(_sum, 2, 10)
    assert [x for x, _ in first] == [21, 21]
    second = rank_pool.run(_sum, 3, 0)
    assert [x for x, _ in second] == [3, 3, 3]
    assert [pid for _, pid in first] == [pid for _, pid in second[:2]]


def test_exception_comes_back_with_its_rank(rank_pool: RankPool):
    with pytest.raises(RankError, match="rank 1 is bad") as error:
        rank_pool.run(_raise_on, 2, 1)
    assert isinstance(error.value.outcomes[1].cause, ValueError)
    assert [x for x, _ in rank_pool.run(_sum, 2, 0)] == [1, 1]


def test_hung_and_dead_ranks_are_replaced():
    pool = RankPool(2)
    try:
        found = pool.outcomes(_hang, 2, timeout_s=5, with_group=False)
        assert found[1].type_name == "TimeoutError"
        found = pool.outcomes(_die, 2, with_group=False)
        assert "exit code 3" in str(found[0])
        assert [x for x, _ in pool.run(_sum, 2, 0)] == [1, 1]
    finally:
        pool.close()


def test_ranks_that_could_not_enter_their_group_are_replaced():
    """torch would number a later group of theirs unlike their peers', and all would wait for it."""
    pool = RankPool(2)
    try:
        for found in pool.outcomes(_sum, 2, 0, backend="no such backend"):
            assert f"exit code {JOIN_FAILED}" in str(found)
        assert [x for x, _ in pool.run(_sum, 2, 0)] == [1, 1]
    finally:
        pool.close()


def test_a_rank_may_leave_at_once(rank_pool: RankPool):
    for _ in range(20):
        assert rank_pool.run(_own_rank, 2) == [0, 1]
