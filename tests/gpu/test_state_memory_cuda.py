"""Memory of a hybrid model on a GPU: what is free is split between snapshots of states and KV blocks."""

from pathlib import Path

import pytest
import torch

from tests.devices import take_gpu
from tests.distributed.engine_harness import make_request, rank_config
from tests.gpu_families import released_shape
from tests.unit.schedulers import snapshots_of
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FRACTION = 0.05


def test_free_memory_is_split_by_the_length_of_a_usual_request(tmp_path: Path) -> None:
    take_gpu(0)
    config = rank_config(
        released_shape(tmp_path / "model", "qwen3_next"),
        1,
        "cuda",
        model={"dtype": "bfloat16", "max_model_len": 1024},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 256},
        cache={"num_blocks": "auto", "memory_fraction": FRACTION, "expected_tokens": 512},
    )
    process = RankProcess(0, config)
    epoch, cached = Epoch(process, Rendezvous("", 0, "alone"), 30), []
    try:
        epoch.load()
        epoch.start_engine(
            lambda _, outputs: cached.extend(o.num_cached_tokens for o in outputs if o.token_ids),
            lambda step: None,
        )
        assert (
            process.caches.num_snapshots > 100 and snapshots_of(process.caches.manager) is not None
        )
        assert {len(pool.state) for pool in process.caches.states} == {
            1 + 8 + process.caches.num_snapshots
        }
        usual = process.caches.demand.blocks(512)
        requests = 8 + process.caches.num_snapshots
        assert requests * usual <= process.caches.num_blocks < 1.1 * requests * usual
        assert torch.cuda.memory_allocated() < FRACTION * torch.cuda.mem_get_info()[1]
        for name in "ab":
            epoch.engine.submit(make_request(name, [7 * i % 251 for i in range(200)], max_tokens=1))
            while epoch.engine.step().run:
                pass
        assert cached == [0, 192]
    finally:
        epoch.process.close()
