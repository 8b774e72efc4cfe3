"""Processes that have mapped memory of peers in different numbers of groups map each other's: a rank and a new one."""

from typing import Any

import pytest
import torch

from kernels.all2all.peer_memory import HEADER_BYTES, PeerMemory
from tests.devices import need_gpus, take_gpu
from tests.distributed.rank_pool import GroupInfo, RankPool

pytestmark = pytest.mark.gpu

NUM_BYTES, NUM_ALONE = 4096, 3


def read_the_peer(rank: int, num_ranks: int, info: GroupInfo) -> list[int]:
    """Rank 0 meets NUM_ALONE times alone, then both ranks meet; each returns a byte of its peer."""
    import torch.distributed as dist

    take_gpu(rank)
    device = torch.device("cuda", torch.cuda.current_device())
    alone: list[Any] = [
        dist.new_group([rank], backend="gloo", use_local_synchronization=True)
        for _ in range(NUM_ALONE if rank == 0 else 0)
    ]
    held = [PeerMemory(group, device, NUM_BYTES) for group in alone]
    found = []
    for turn in range(2):
        memory = PeerMemory(dist.group.WORLD, device, NUM_BYTES)
        memory.local[HEADER_BYTES:] = 10 * turn + rank
        torch.cuda.synchronize()
        dist.barrier()
        found.append(int(memory.of(1 - rank)[-1]))
        dist.barrier()
    assert len(held) == len(alone)
    return found


def test_a_living_process_meets_a_new_one():
    need_gpus(2)
    pool = RankPool(2)
    try:
        found = pool.run(read_the_peer, 2, timeout_s=60, backend="cpu:gloo,cuda:nccl")
    finally:
        pool.close()
    assert found == [[1, 11], [0, 10]]
