"""Maps of experts to slots: the contiguous map, maps of any order, and a model under them."""

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
from kernels.routing.expert_map import STANDBY, ContiguousMap, PlacedMap, kept_runs
from tests.checkpoints.writer import make_checkpoint
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from tests.unit.test_fp8_checkpoint import Fp8Gemm
from workers.layers.moe import FREE
from workers.models.decoder import DecoderLM
from workers.models.registry import load_model_config
from workers.weights.initial_weights import draw_weights
from workers.weights.loader import load_weights
from workers.weights.tensors import four_bit_experts

torch.set_num_threads(1)
BATCH = make_batch([[1, 2, 3, 4, 5], [200, 100, 7]], [0, 0], padding=2)
CPU = torch.device("cpu")


def one_rank(*layers: Sequence[int]) -> PlacedMap:
    """All experts on one rank, in these orders."""
    return PlacedMap(len(layers[0]), (0, len(layers[0])), tuple(map(tuple, layers)))


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
    layers = len(contiguous.layers)
    orders = [3, 1, 2, 0, 7, 5, 4, 6], [7, 0, 1, 2, 6, 3, 5, 4], [7, 6, 5, 4, 3, 2, 1, 0]
    first = one_rank(*(orders[0], orders[2], orders[1])[:layers])
    second = one_rank(*(orders[1], orders[0], orders[1])[:layers])
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
    rank.model.filled()
    for block in rank.model.moe_blocks().values():  # as after an error in the middle of a load
        block.held[block.held.index(5)] = FREE
    rank.model.hold_experts(second, 0)
    missing = {(layer, 5) for layer in range(layers)}
    assert rank.model.missing() == missing
    for slot in (s for key, s in rank.model.weight_slots().items() if "experts.5." in key):
        slot.fill(torch.full(slot.target.shape, 2.0))
    if form == "dense":
        draw = {"config": rank.config, "expert_map": second, **where}
        draw_weights(rank.model, **draw, experts=missing)
    else:
        where |= {"config": rank.config, "expert_map": second}
        load_weights(rank.model, path, experts=missing, **where)
    torch.testing.assert_close(rank.logits(BATCH), expected)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(found, BlockWeights):
        found, expected = found.values.view(torch.uint8), expected.values.view(torch.uint8)
    if isinstance(found, FourBitWeights):
        found, expected = found.matrix().dequantise(), expected.matrix().dequantise()
    assert torch.equal(found, expected)


@given(st.integers(2, 20), st.integers(1, 5), st.integers(0, 4))
def test_spare_slots_hold_experts_of_other_ranks(num_experts, num_ranks, spare) -> None:
    spare = min(spare, num_experts - -(-num_experts // num_ranks))
    found = ContiguousMap(num_experts, num_ranks, spare)
    plain = ContiguousMap(num_experts, num_ranks)
    for rank in range(num_ranks):
        experts = [*found.experts_of(rank)]
        assert experts[: len(experts) - spare] == [*plain.experts_of(rank)]
        assert len(set(experts)) == len(experts) == len(found.slots_of(rank))
    assert found.num_slots == num_experts + spare * num_ranks
    assert not found.experts_of(STANDBY) and found.is_identity == (not spare)
    PlacedMap(num_experts, found.starts, (found.experts(),))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((0, 1, 2), "layer 0: it has 3 slots, expected 4"),
        ((0, 1, 1, 0), r"layer 0: experts \[2\] have no slot"),
        ((0, 1, 2, 3), r"experts \[3\] have no slot, or are none of 0 to 2"),
        ((0, 1, 2, 2), "layer 0: rank 1 holds an expert twice"),
    ],
)
def test_a_map_without_an_expert_or_with_two_copies_on_a_rank_is_refused(slots, message) -> None:
    with pytest.raises(ValueError, match=message):
        PlacedMap(3, (0, 2, 4), (slots,))
