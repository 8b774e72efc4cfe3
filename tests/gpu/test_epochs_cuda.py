"""Ten epochs on GPUs, in living processes, with the seconds of each stage; see tests/distributed/test_epochs.py."""

from pathlib import Path

import pytest
import torch

from kernels.backends.select import probe
from tests.devices import need_gpus
from tests.distributed.engine_harness import Event, make_request
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_epochs import live
from tests.gpu.test_cuda_graphs import check_answers, checkpoint, configure
from workers.rank.process_group import local_rendezvous

MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

__all__ = ["checkpoint"]  # a fixture

NUM_EPOCHS, WARM_UP_EPOCHS, NUM_RANKS = 10, 3, 2
DEVICE_BOUND = (
    64 << 20
)  # bytes of a GPU that epochs after the warm-up may add: the allocators' noise


@pytest.mark.parametrize(("all2all", "overlap"), [("copy_engine", "on"), ("allgather", "off")])
def test_ten_epochs(checkpoint: Path, all2all: str, overlap: str):
    need_gpus(NUM_RANKS)
    config = configure(checkpoint, NUM_RANKS, all2all, overlap)
    requests = [
        [
            make_request(
                f"{rank}-{index}", [7 * index + token for token in range(20)], max_tokens=200
            )
            for index in range(10)
        ]
        for rank in range(NUM_RANKS)
    ]
    pool = RankPool(NUM_RANKS)
    try:
        with local_rendezvous() as rendezvous:
            found = pool.run(
                live,
                NUM_RANKS,
                config,
                rendezvous,
                requests,
                NUM_EPOCHS,
                with_group=False,
                timeout_s=400,
            )
    finally:
        pool.close()
    for number, seconds in enumerate(found[0].seconds):
        print(number, {stage: round(spent, 3) for stage, spent in seconds.items()})
    events = [Event(0, rank, request) for rank in range(NUM_RANKS) for request in requests[rank]]
    check_answers(checkpoint, events, found)
    for rank in found:
        held = rank.device_bytes[WARM_UP_EPOCHS:]
        assert max(held) - held[0] < DEVICE_BOUND, [x >> 20 for x in rank.device_bytes]
        assert min(rank.threads[-3:]) <= max(rank.threads[:WARM_UP_EPOCHS])
        first, later = rank.seconds[0], rank.seconds[1:NUM_EPOCHS]
        assert max(sum(stages.values()) for stages in later) < sum(first.values())
