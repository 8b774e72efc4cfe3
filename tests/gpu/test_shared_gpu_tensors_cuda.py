"""Two processes that copy slots of each other's GPU tensors; with PHALANX_TEST_SHARE_GPUS=1 on one GPU."""

import json
from typing import Any

import pytest
import torch

from tests.devices import need_gpus, take_gpu
from tests.distributed.rank_pool import GroupInfo, RankPool

pytestmark = pytest.mark.gpu

SLOTS, TURNS = 4, 3


def read_the_peer(rank: int, num_ranks: int, info: GroupInfo) -> list[list[float]]:
    """Share a large and two small tensors, copy slots of the peer's, on a stream; again after unmapping."""
    import torch.distributed as dist

    from kernels.host.shared_gpu_tensors import GpuMappings, share_gpu

    device = take_gpu(rank)
    sizes = (1 << 20, 33, 7)
    own = [torch.empty(SLOTS, size, device=device, dtype=torch.bfloat16) for size in sizes]
    empty = torch.empty(0, 5, device=device)
    found: list[list[float]] = []
    for turn in range(TURNS):
        for place, tensor in enumerate(own):
            tensor.copy_(
                torch.arange(SLOTS, device=device).unsqueeze(1) + 10 * rank + 40 * turn + 4 * place
            )
        torch.cuda.synchronize()
        handles: list[Any] = [None, None]
        dist.all_gather_object(handles, json.dumps([share_gpu(it) for it in (*own, empty)]))
        mappings = GpuMappings(device)
        *peers, none = map(mappings.open, json.loads(handles[1 - rank]))
        with pytest.raises(AssertionError):
            none.copy_slot(0, empty)
        with torch.cuda.stream(torch.cuda.Stream(device)) as _:
            targets = [torch.empty_like(tensor[0]) for tensor in own]
            for slot, (peer, target) in enumerate(zip(peers, targets, strict=True)):
                peer.copy_slot(slot, target)
            torch.cuda.current_stream().synchronize()
        found.append([float(target.unique().item()) for target in targets])
        mappings.close()
        dist.barrier()
    return found


def test_slots_of_the_peers_tensors():
    need_gpus(2)
    pool = RankPool(2)
    try:
        found = pool.run(read_the_peer, 2, timeout_s=60)
    finally:
        pool.close()
    for rank in range(2):
        assert found[rank] == [
            [slot + 10 * (1 - rank) + 40 * turn + 4 * slot for slot in range(3)]
            for turn in range(TURNS)
        ]
