"""Waits for a peer that never comes end on GPUs when a rank aborts: in kernels, and in streams."""

import threading
import time
from typing import Any

import pytest
import torch

from tests.devices import need_gpus, take_gpu
from tests.distributed.rank_pool import GroupInfo, RankPool
from tests.gpu.test_all2all_cuda import MAX_TOKENS, build, draw, skip_unavailable

pytestmark = pytest.mark.gpu

ABORT_S = 0.5  # the wait lasts so long
ENDED_S = 3.0  # and ends so soon afterwards
ROUNDS = 40  # exchanges that a step may hold


def wait_alone(rank: int, num_ranks: int, info: GroupInfo, name: str) -> tuple[float, bool]:
    """Rank 0 exchanges without its peers: seconds until its device is idle, and whether it was before the abort."""
    import torch.distributed as dist

    take_gpu(rank)
    all2all = build(name, rank, num_ranks)
    x, ids, weights = draw(MAX_TOKENS, torch.Generator("cuda").manual_seed(1))

    def exchange() -> None:
        for _ in range(ROUNDS):
            routed = all2all.dispatch(x, ids, weights).wait()
            answers = torch.zeros_like(routed.permuted_rows())
            all2all.combine(answers, routed.handle).wait()

    # The driver loads a kernel at its first launch, and that waits for kernels which run: load all of them before.
    exchange()
    torch.cuda.synchronize()
    dist.barrier()
    seconds, early = 0.0, False
    if rank == 0:
        exchange()
        done = torch.cuda.Event()
        done.record()
        time.sleep(ABORT_S)
        early = done.query()
        started = time.monotonic()
        threading.Thread(target=all2all.abort).start()
        done.synchronize()
        seconds = time.monotonic() - started
    dist.barrier()
    all2all.close()
    return seconds, early


@pytest.mark.parametrize("name", ["symm", "copy_engine", "copies"])
def test_an_abort_ends_the_waits_of_many_exchanges(name: str):
    need_gpus(2)
    skip_unavailable(name)
    pool = RankPool(2)
    try:
        found: Any = pool.run(wait_alone, 2, name, timeout_s=60, backend="cpu:gloo,cuda:nccl")
    finally:
        pool.close()
    seconds, early = found[0]
    assert not early, "the exchanges ended without their peer"
    assert seconds < ENDED_S


def reset_together(rank: int, num_ranks: int, info: GroupInfo, name: str) -> bool:
    """All ranks leave out the combine of one dispatch, as after an error that all have met; then they exchange."""
    take_gpu(rank)
    all2all = build(name, rank, num_ranks)
    x, ids, weights = draw(24, torch.Generator("cuda").manual_seed(rank))
    all2all.dispatch(x, ids, weights).wait()
    torch.cuda.synchronize()
    with pytest.raises(AssertionError, match="the last dispatch has no combine"):
        all2all.dispatch(x, ids, weights)
    all2all.reset()
    routed = all2all.dispatch(x, ids, weights).wait()
    answers = torch.zeros_like(routed.permuted_rows())
    all2all.combine(answers, routed.handle).wait()
    torch.cuda.synchronize()
    all2all.close()
    return True


@pytest.mark.parametrize("name", ["symm", "copy_engine", "copies"])
def test_ranks_go_on_after_a_dispatch_without_its_combine(name: str):
    need_gpus(2)
    skip_unavailable(name)
    pool = RankPool(2)
    try:
        assert all(pool.run(reset_together, 2, name, timeout_s=60, backend="cpu:gloo,cuda:nccl"))
    finally:
        pool.close()
