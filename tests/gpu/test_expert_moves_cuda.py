"""Experts that move on GPUs: the map in captured routing, weights after many moves, and engines with CUDA graphs.

The engines need two GPUs, or PHALANX_TEST_SHARE_GPUS=1 to share one.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends.select import probe
from kernels.block_fp8 import BlockWeights
from kernels.routing.expert_slots import to_slots
from kernels.slot_table import SlotTable
from tests.devices import need_gpus, take_gpu
from tests.distributed.engine_harness import Event, make_request, run_engines
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_expert_moves import moving_rank, random_slots
from tests.gpu.test_cuda_graphs import Answers, check_answers, checkpoint, configure
from tests.unit.model_case import small_checkpoint
from workers.rank.expert_staging import ExpertStager
from workers.rank.process import RankProcess

MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

__all__ = ["checkpoint"]  # a fixture

EXPERTS = 8
SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": EXPERTS}
MOVES = 20


@pytest.mark.parametrize("spread", [False, True])
def test_a_captured_router_reads_the_map_of_each_replay(spread: bool):
    from kernels.triton.route import route_top_k

    take_gpu(0)
    starts = [0, 5, 10]
    maps = [[0, 1, 2, 3, 7, 4, 5, 6, 7, 0], [7, 1, 2, 3, 4, 4, 5, 6, 0, 1]]
    table, other = (SlotTable.of(experts, starts, EXPERTS, 1, "cuda") for experts in maps)
    logits = torch.randn(33, EXPERTS, device="cuda")
    experts, _ = route_top_k(logits, 3, True, 31)
    route_top_k(logits, 3, True, 31, table=table, spread=spread)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots, _ = route_top_k(logits, 3, True, 31, table=table, spread=spread)
    for number, found in enumerate(maps):
        if number:
            table.copy_from(other)
        graph.replay()
        cpu = SlotTable.of(found, starts, EXPERTS, 1, "cpu")
        assert torch.equal(slots.cpu(), to_slots(experts.cpu(), cpu, spread))


def plain(weights: Any) -> torch.Tensor:
    return weights.values.view(torch.uint8) if isinstance(weights, BlockWeights) else weights


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("weights", ["checkpoint", "dummy"])
def test_weights_after_many_moves_are_those_of_a_new_process(
    tmp_path: Path, fp8: bool, weights: str
):
    take_gpu(0)
    path = small_checkpoint(tmp_path / "model", fp8=fp8, head_dim=64, **SIZES)
    config = configure(path, 2, "allgather", grouped_gemm="auto")
    experts = config.experts.model_copy(update={"redundant_slots": 1, "rebalance": "auto"})
    model = config.model.model_copy(update={"weights": weights, "max_model_len": 64})
    config = config.model_copy(update={"experts": experts, "model": model})
    processes = [RankProcess(rank, config) for rank in range(2)]
    for process in processes:
        process.load()
    stagers = [ExpertStager(process, lambda layer: None) for process in processes]
    draw, layout = random.Random(2), processes[0].experts.present
    allocated: list[int] = []
    for _ in range(MOVES):
        for layer, it in layout.layers.items():
            slots = random_slots(draw, it.slots, processes[0].experts.base)
            staged = [stager.stage(layer, slots) for stager in stagers]
            for stager, one in zip(stagers, staged, strict=True):
                stager.commit(one)
        layout = processes[0].experts.present
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[5:]) <= max(allocated[:5]) + 2**20, "memory is flat"
    for process in processes:
        fresh = RankProcess(process.rank, config, layout)
        fresh.load()
        for number, block in process.model.moe_blocks().items():
            same = fresh.model.moe_blocks()[number]
            assert block.held == same.held
            for mine, new in zip(block.parameters, same.parameters, strict=True):
                assert torch.equal(plain(mine), plain(new))
                if isinstance(mine, BlockWeights):
                    assert torch.equal(mine.scales, new.scales)
            assert torch.equal(block.table.slots_EC, same.table.slots_EC)
        fresh.close()
    for process in processes:
        process.close()


@pytest.mark.parametrize(
    ("all2all", "overlap", "spare"),
    [("copy_engine", "off", 1), ("symm", "on", 2), ("allgather", "off", 0)],
)
def test_answers_while_experts_move_under_graphs(
    checkpoint: Path, all2all: str, overlap: str, spare: int
):
    """The ranks compare their weights with those of a new process at the end."""
    need_gpus(2)
    config = configure(checkpoint, 2, all2all, overlap)
    experts = config.experts.model_copy(update={"redundant_slots": spare, "rebalance": "auto"})
    config = config.model_copy(update={"experts": experts})
    events = [
        Event(
            4 * index,
            index % 2,
            make_request(f"r{index}", [*range(index, index + 20)], max_tokens=60),
        )
        for index in range(12)
    ]
    pool = RankPool(2)
    try:
        found = run_engines(pool, config, events, function=moving_rank, timeout_s=400)
    finally:
        pool.close()
    check_answers(checkpoint, events, [Answers(it.tokens, it.reasons) for it in found])
