"""Maps of experts to slots: the contiguous map, and a model under a map in another order."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.backends.select import probe
from kernels.block_fp8 import BlockWeights
from kernels.four_bit import FourBitWeights
from kernels.grouped_gemm.native_four_bit import NativeFourBit
from kernels.routing.expert_map import STANDBY, ContiguousMap, ExpertMap, kept_runs
from tests.checkpoints.writer import make_checkpoint
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from tests.unit.test_fp8_checkpoint import Fp8Gemm
from workers.models.decoder import DecoderLM
from workers.models.registry import load_model_config
from workers.weights.initial_weights import draw_weights
from workers.weights.loader import load_weights
from workers.weights.tensors import four_bit_experts

torch.set_num_threads(1)
BATCH = make_batch([[1, 2, 3, 4, 5], [200, 100, 7]], [0, 0], padding=2)
CPU = torch.device("cpu")


class Shuffled(ExpertMap):
    """All experts on one rank, in the order of `experts`."""

    num_ranks = 1

    def __init__(self, experts: Sequence[int]):
        self._experts, self.num_experts = tuple(experts), len(experts)
        self._slots = torch.tensor([*self._experts, -1]).argsort().roll(-1)
        self._slots[-1] = -1

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, self.num_experts)

    def experts_of(self, rank: int) -> Sequence[int]:
        return self._experts

    def to_slots(self, topk_idx_TK: torch.Tensor) -> torch.Tensor:
        return self._slots[topk_idx_TK]


@given(st.integers(1, 40), st.integers(1, 12))
def test_contiguous_ranges_cover_all_experts_evenly(num_experts: int, num_ranks: int) -> None:
    found = ContiguousMap(num_experts, num_ranks)
    held = [list(found.experts_of(rank)) for rank in range(num_ranks)]
    assert [*chain(*held)] == list(range(num_experts)) and found.num_slots == num_experts
    sizes = [len(experts) for experts in held]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
    assert [list(found.slots_of(rank)) for rank in range(num_ranks)] == held
    assert not found.experts_of(STANDBY) and not found.slots_of(STANDBY)
    assert found == ContiguousMap(num_experts, num_ranks) != ContiguousMap(num_experts + 1, 1)


@given(st.permutations(range(9)), st.permutations(range(9)), st.sets(st.integers(0, 8)))
def test_kept_runs_move_each_kept_expert_once(before, after, kept) -> None:
    before, after = before[:6], after[:6]
    kept &= {*before} & {*after}
    moved = [
        pair
        for to, at in kept_runs(before, after, kept)
        for pair in zip(after[to], before[at], strict=True)
    ]
    assert all(new == old for new, old in moved)
    assert sorted(new for new, _ in moved) == sorted(kept)


def test_neighbours_are_one_run() -> None:
    runs = list(kept_runs(range(4, 12), range(6, 20), range(6, 12)))
    assert runs == [(slice(0, 6), slice(2, 8))]
    assert list(kept_runs((), range(3), ())) == []


@pytest.mark.parametrize("form", ["dense", "fp8", "four_bits"])
def test_logits_do_not_depend_on_the_map(tmp_path: Path, form: str) -> None:
    """Weights are loaded, drawn and kept by logical experts."""
    if form == "fp8":
        sizes: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128}
        path = make_checkpoint(tmp_path, fp8=True, num_experts=8, num_layers=2, **sizes)
        rank = OneRank(path, grouped_gemm=Fp8Gemm())
    elif form == "four_bits":
        if reason := probe("cpu").get("grouped_gemm.native_four_bit"):
            pytest.skip(reason)
        path = small_checkpoint(tmp_path, quantization="gptq-ordered", moe_intermediate_size=64)
        four_bit = four_bit_experts(load_model_config(path))
        assert four_bit is not None
        rank = OneRank(path, grouped_gemm=NativeFourBit(four_bit))
    else:
        path = small_checkpoint(tmp_path)
        rank = OneRank(path)
    expected, contiguous = rank.logits(BATCH), rank.model
    first, second = Shuffled([3, 1, 2, 0, 7, 5, 4, 6]), Shuffled([7, 0, 1, 2, 6, 3, 5, 4])
    where: dict[str, Any] = {"rank": 0, "device": CPU}
    rank.model = DecoderLM(
        rank.config, rank.backends, expert_map=first, dtype=torch.float32, **where
    )
    load_weights(rank.model, path, config=rank.config, expert_map=first, **where)
    held = rank.model.layers[0].mlp.w2_eDI
    assert isinstance(held, BlockWeights) == (form == "fp8")
    assert isinstance(held, FourBitWeights) == (form == "four_bits")
    assert_same(held[0], contiguous.layers[0].mlp.w2_eDI[3])
    torch.testing.assert_close(rank.logits(BATCH), expected)
    kept = [0, 1, 2, 3, 4, 6, 7]
    rank.model.hold_experts(second, 0, kept)
    for slot in (s for key, s in rank.model.weight_slots().items() if "experts.5." in key):
        slot.fill(torch.full(slot.target.shape, 2.0))
    if form == "dense":
        draw = {"config": rank.config, "expert_map": second, **where}
        draw_weights(rank.model, **draw, experts=[5])
    else:
        load_weights(rank.model, path, config=rank.config, expert_map=second, experts=[5], **where)
    torch.testing.assert_close(rank.logits(BATCH), expected)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(found, BlockWeights):
        found, expected = found.values.view(torch.uint8), expected.values.view(torch.uint8)
    if isinstance(found, FourBitWeights):
        found, expected = found.matrix().dequantise(), expected.matrix().dequantise()
    assert torch.equal(found, expected)


def test_padding_has_no_slot() -> None:
    shuffled = Shuffled([2, 0, 1])
    topk_idx = torch.tensor([[0, 2], [1, -1], [-1, -1]])
    assert shuffled.to_slots(topk_idx).tolist() == [[1, 0], [2, -1], [-1, -1]]
    assert ContiguousMap(3, 1).to_slots(topk_idx) is topk_idx
