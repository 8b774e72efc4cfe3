"""Experts staged beside steps: after any number of moves a rank has the weights of a new process, in place."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends.select import probe
from kernels.four_bit import FourBitWeights
from kernels.slot_table import SlotTable
from tests.distributed.engine_harness import rank_config
from tests.unit.model_case import small_checkpoint
from workers.rank import expert_staging
from workers.rank.expert_staging import ExpertStager
from workers.rank.peer_experts import PeerExperts
from workers.rank.process import RankProcess
from workers.specs.expert_layout import ExpertLayout, LayerLayout

EXPERTS, LAYERS, RANKS = 8, 3, 2
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dummy": {},
    "four_bits": {"quantization": "gptq-ordered", "moe_intermediate_size": 64},
    "biases": {},
}


def random_layout(draw: random.Random, before: ExpertLayout) -> ExpertLayout:
    """Any map in every layer; experts that stay on a rank keep their slots."""
    layers = {}
    for layer, it in before.layers.items():
        slots: list[int] = []
        while len(set(slots)) < EXPERTS:
            slots = []
            for start, end in pairwise(before.starts):
                was, now = it.slots[start:end], draw.sample(range(EXPERTS), end - start)
                coming = iter([expert for expert in now if expert not in was])
                slots += [expert if expert in now else next(coming) for expert in was]
        layers[layer] = LayerLayout(tuple(slots))
    return ExpertLayout(EXPERTS, before.starts, layers)


def plain(weights: Any) -> torch.Tensor:
    if isinstance(weights, FourBitWeights):
        return torch.cat(
            [weights[place].matrix().dequantise() for place in range(weights.shape[0])]
        )
    assert isinstance(weights, torch.Tensor)
    return weights


def assert_same(process: RankProcess, other: RankProcess) -> None:
    mine, theirs = process.model.moe_blocks(), other.model.moe_blocks()
    for number, block in mine.items():
        assert block.held == block.wanted == theirs[number].held
        for ours, new in zip(block.parameters, theirs[number].parameters, strict=True):
            assert torch.equal(plain(ours), plain(new))
        assert torch.equal(block.table.slots_EC, theirs[number].table.slots_EC)
        assert torch.equal(block.table.copies_E, theirs[number].table.copies_E)


@pytest.fixture
def processes(tmp_path: Path, request: pytest.FixtureRequest):
    form = request.param
    if form == "four_bits" and (reason := probe("cpu").get("grouped_gemm.native_four_bit")):
        pytest.skip(reason)
    path = small_checkpoint(tmp_path / "model", **FORMS[form])
    sections = {
        "model": {"weights": "dummy" if form == "dummy" else "checkpoint", "max_model_len": 64},
        "cache": {"num_blocks": 8},
        "experts": {"redundant_slots": 1, "rebalance": "auto"},
    }
    made = [RankProcess(rank, rank_config(path, RANKS, **sections)) for rank in range(RANKS)]
    for process in made:
        process.load()
    yield made
    for process in made:
        process.close()


def addresses(process: RankProcess) -> list[int]:
    found = []
    for block in process.model.moe_blocks().values():
        tensors = [block.table.slots_EC, block.table.copies_E]
        tensors += [it for it in block.parameters if isinstance(it, torch.Tensor)]
        found += [tensor.data_ptr() for tensor in tensors]
    return found


@pytest.mark.parametrize("moves", [8, pytest.param(200, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("processes", ["dense", "dummy", "four_bits"], indirect=True)
@pytest.mark.parametrize("from_peers", [False, True])
def test_weights_after_many_moves_are_those_of_the_checkpoint(processes, moves, from_peers):
    draw, told = random.Random(3), []
    handles = [json.loads(json.dumps(process.experts.handles)) for process in processes]
    peers = [
        PeerExperts.meet(
            process.rank, process.dims, process.device, handles[0], lambda own: handles
        )
        for process in processes
    ]
    stagers = [
        ExpertStager(process, told.append, own if from_peers else None)
        for process, own in zip(processes, peers, strict=True)
    ]
    if from_peers:
        for stager in stagers:  # all experts are in the memory of the other rank
            stager._checkpoint, stager._entries = None, {}
    before = [addresses(process) for process in processes]
    layout = processes[0].experts.present
    for _ in range(moves):
        layout = random_layout(draw, layout)
        for layer, it in layout.layers.items():
            staged = [stager.stage(layer, it.slots) for stager in stagers]
            for stager, one in zip(stagers, staged, strict=True):
                stager.commit(one)
    assert told == [layer for _ in range(moves) for layer in range(LAYERS) for _ in stagers]
    assert (min(own.copied for own in peers) >= moves) == from_peers
    for process, first in zip(processes, before, strict=True):
        assert process.experts.present == layout and addresses(process) == first
        fresh = RankProcess(process.rank, process.config, layout)
        fresh.load()
        assert_same(process, fresh)
        fresh.close()


@pytest.mark.parametrize("processes", ["dense"], indirect=True)
def test_a_layer_that_is_staged_and_not_committed_leaves_no_trace(processes):
    process = processes[0]
    stager, layout = ExpertStager(process, lambda layer: None), process.experts.present
    other = random_layout(random.Random(1), layout)
    stager.stage(1, other.layers[1].slots)
    fresh = RankProcess(0, process.config)
    fresh.load()
    assert_same(process, fresh)
    assert process.experts.layout is None
    fresh.close()


@pytest.mark.parametrize("processes", ["dense"], indirect=True)
def test_the_next_epoch_reads_what_its_map_adds(processes, monkeypatch):
    """A death in the middle of a move: the supervisor's map decides, whatever layers were committed here."""
    process, read = processes[0], []
    original = process._read_weights

    def reading(model: Any, progress: Any, experts: Any = None) -> None:
        read.append(sorted(experts))
        original(model, progress, experts)

    monkeypatch.setattr(process, "_read_weights", reading)
    stager, layout = ExpertStager(process, lambda layer: None), process.experts.present
    wanted = random_layout(random.Random(1), layout)
    for layer in range(2):  # of three layers
        stager.commit(stager.stage(layer, wanted.layers[layer].slots))
    held, memory = process.model.moe_blocks()[2].held[:], addresses(process)
    process.become(0, process.config, wanted)
    process.load()
    own = wanted.layers[2].slots[: len(held)]
    assert read == [[(2, expert) for expert in sorted(set(own) - set(held))]]
    assert [
        it.data_ptr() for block in process.model.moe_blocks().values() for it in block.parameters
    ]
    fresh = RankProcess(0, process.config, wanted)
    fresh.load()
    assert_same(process, fresh)
    assert len(memory) == len(addresses(process))
    fresh.close()
    spare = process.experts.spare
    process.become(1, process.config, wanted)
    process.load()
    assert process.experts.spare is spare, "the spare memory of equal slots stays"


@pytest.mark.parametrize("processes", ["dense"], indirect=True)
def test_weights_of_a_rank_that_has_ended_come_from_the_checkpoint(processes, caplog):
    process, _ = processes
    handles = [it.experts.handles for it in processes]
    gone = {layer: [{**one, "started": 1} for one in found] for layer, found in handles[1].items()}
    peers = PeerExperts.meet(0, process.dims, process.device, handles[0], lambda own: [own, gone])
    assert "experts of rank 1 come from the checkpoint: process" in caplog.text
    stager = ExpertStager(process, lambda layer: None, peers)
    wanted = random_layout(random.Random(1), process.experts.present)
    for layer, it in wanted.layers.items():
        stager.commit(stager.stage(layer, it.slots))
    fresh = RankProcess(0, process.config, wanted)
    fresh.load()
    assert_same(process, fresh)
    assert peers.copied == 0
    fresh.close()


def test_a_table_has_one_shape_for_all_maps_of_equal_slots():
    starts = [0, 5, 10]
    first = SlotTable.of([0, 1, 2, 3, 4, 5, 6, 7, 0, 1], starts, EXPERTS, 0, "cpu")
    second = SlotTable.of([0, 1, 2, 3, 7, 4, 5, 6, 7, 0], starts, EXPERTS, 0, "cpu")
    assert first.slots_EC.shape == second.slots_EC.shape == (8, 2)


@pytest.mark.parametrize("processes", ["dense"], indirect=True)
def test_layers_share_the_spare_memory_until_their_commit(processes, monkeypatch):
    """Of five places on each rank, layers with one and three new experts take four; one place is left."""
    stagers = [ExpertStager(process, lambda layer: None) for process in processes]
    layout = processes[0].experts.present
    assert layout.layers[0].slots == (0, 1, 2, 3, 4, 4, 5, 6, 7, 0)
    first, second = (7, 1, 2, 3, 4, 4, 5, 6, 1, 0), (0, 6, 7, 5, 4, 4, 1, 2, 3, 0)
    waiting: list[list[Any]] = [[], []]
    for layer, slots in ((0, first), (1, second)):
        for stager, own in zip(stagers, waiting, strict=True):
            assert stager.fits(layer, slots, own)
            own.append(stager.stage(layer, slots, own))
    places = [[at for it in own for _, at in it.places] for own in waiting]
    assert [len({*it}) for it in places] == [4, 4]
    for stager, own in zip(stagers, waiting, strict=True):
        assert stager.fits(2, first, own) and not stager.fits(2, second, own)
    assert all(stager.fits(2, second, []) for stager in stagers)
    monkeypatch.setitem(expert_staging.COMMIT_BYTES, "cpu", 1000)
    assert not stagers[0].fits(2, first, waiting[0]), "a step copies so much at most"
    for stager, own in zip(stagers, waiting, strict=True):
        for staged in own:
            stager.commit(staged)
    for process in processes:
        fresh = RankProcess(process.rank, process.config, process.experts.present)
        fresh.load()
        assert_same(process, fresh)
        fresh.close()
