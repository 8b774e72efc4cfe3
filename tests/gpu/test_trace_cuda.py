"""A profiled step on GPUs, with CUDA graphs and without: its kernels are in the trace."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends.select import probe
from tests.checkpoints.writer import make_checkpoint
from tests.devices import need_gpus, take_gpu
from tests.distributed.engine_harness import rank_config
from tests.distributed.rank_pool import RankPool
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import RankTrace
from workers.rank.trace_step import trace_step

MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

LAYERS, NUM_RANKS = 4, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "model"
    sizes = {"num_layers": LAYERS, "hidden_size": 1024, "num_experts": 16, "num_experts_per_tok": 4}
    return make_checkpoint(path, **sizes, num_heads=8, num_kv_heads=2, head_dim=128)


def traced(
    index: int, _ranks: int, _info: Any, config, rendezvous, graphs: bool
) -> list[RankTrace]:
    """A prefill and a decode of one rank, each in both forms."""
    take_gpu(index)
    process = RankProcess(index, config)
    try:
        epoch = Epoch(process, rendezvous, 60)
        epoch.load()
        traces = [trace_step(epoch, "prefill", 1024), trace_step(epoch, "decode", 8)]
        assert (epoch.engine.runner.graphs is not None) == graphs
        return traces
    finally:
        process.close()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("all2all", ["copy_engine", "allgather"])
def test_both_forms_are_traced(checkpoint: Path, all2all: str, graphs: bool):
    need_gpus(NUM_RANKS)
    config = rank_config(
        checkpoint,
        NUM_RANKS,
        "cuda",
        model={"dtype": "bfloat16", "max_model_len": 1024},
        scheduler={"max_num_seqs": 16, "max_num_batched_tokens": 1024, "cuda_graphs": graphs},
        cache={"num_blocks": 512},
        kernels={"all2all": all2all},
        overlap={"mode": "on"},
    )
    pool = RankPool(NUM_RANKS)
    try:
        with local_rendezvous() as rendezvous:
            arguments = (config, rendezvous, graphs)
            found = pool.run(traced, NUM_RANKS, *arguments, with_group=False, timeout_s=60)
    finally:
        pool.close()
    for prefill, decode in found:
        for trace in (prefill, decode):
            events = json.loads(gzip.decompress(trace.events))["traceEvents"]
            kernels = [event for event in events if event.get("cat") == "kernel"]
            # In a graph each ubatch computes on a stream of its own.
            streams = {kernel["args"]["stream"] for kernel in kernels}
            assert len(kernels) > 2 * LAYERS and len(streams) > graphs, streams
