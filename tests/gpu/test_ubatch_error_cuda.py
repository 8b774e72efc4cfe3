"""An error in one ubatch of one rank on GPUs: it is raised at once, the peer detects it, and the next group serves."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends.select import probe
from tests.devices import need_gpus, take_gpu
from tests.distributed.engine_harness import Event, make_request
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_ubatch_engine import Failing
from tests.gpu.pools import Pools
from tests.gpu.test_cuda_graphs import check_answers, checkpoint, configure, serve
from workers.config import RankConfig
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import Rendezvous

MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

__all__ = ["checkpoint"]  # a fixture

NOTICED_S = 3.0  # the others wait so long for a vote
_kept: list[Any] = []  # a GPU that waits for a peer for ever lets nobody free its memory


def fail(
    index: int, _ranks: int, _info: Any, config: RankConfig, rendezvous: Rendezvous, failing: int
) -> tuple[str, float]:
    """What a rank met when the product of one ubatch of rank 1 failed, and after how many seconds.

    The processes end as actors do: without a word to their GPUs.
    """
    take_gpu(index)
    epoch = Epoch(RankProcess(index, config), rendezvous, 60)
    _kept.append(epoch)
    epoch.load()
    epoch.start_engine(lambda ingress, outputs: None, lambda step: None)
    block = epoch.engine.runner.ubatches._models[failing].layers[1][1]
    product = block.grouped_gemm = Failing(block.grouped_gemm, 2 if index == 1 else 10**9)
    for name in map(str, range(4)):
        epoch.engine.submit(make_request(name, [1, 2, 3], max_tokens=50))
    started = time.monotonic()
    try:
        for _ in range(20):
            epoch.engine.step()
    except (RuntimeError, OSError) as error:
        _kept.append(error)
        seconds = time.monotonic() - (product.failed_at or started)
        return f"{type(error).__name__}: {error}", seconds
    raise AssertionError("no error")


@pytest.mark.parametrize("all2all", ["copy_engine", "symm", "allgather"])
@pytest.mark.parametrize("failing", [0, 1])
def test_the_next_group_serves(checkpoint: Path, all2all: str, failing: int):
    need_gpus(2)
    config = configure(checkpoint, 2, all2all, "on", cuda_graphs=False)
    broken = config.model_copy(update={"vote_timeout_s": NOTICED_S})
    pool, pools = RankPool(2), Pools()
    with local_rendezvous() as rendezvous:  # closed after the processes, which may still be in it
        try:
            arguments = (broken, rendezvous, failing)
            other, failed = pool.run(fail, 2, *arguments, with_group=False, timeout_s=60)
        finally:
            pool.close()
    assert failed[0] == "RuntimeError: the product failed"
    assert failed[1] < 1, "the error did not surface at once"
    assert other[1] < 3 * NOTICED_S, f"the other rank noticed late: {other}"
    prompts = [[7 * index + token for token in range(20)] for index in range(24)]
    events = [
        Event(0, index % 2, make_request(str(index), prompt, max_tokens=30))
        for index, prompt in enumerate(prompts)
    ]
    try:
        with local_rendezvous() as rendezvous:
            arguments = (config, rendezvous, events)
            answers = pools.run(serve, 2, *arguments, with_group=False, timeout_s=60)
    finally:
        pools.close()
    check_answers(checkpoint, events, answers)
