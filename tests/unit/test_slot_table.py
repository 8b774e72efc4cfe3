"""Tables of slots: the copy of an expert that a row takes, in C and by torch's operators."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels.routing.expert_slots
from kernels.routing.balance import plan_layer
from kernels.routing.expert_map import ContiguousMap
from kernels.routing.expert_slots import to_slots
from kernels.slot_table import SlotTable

NUM_EXPERTS = 6


@st.composite
def maps(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    num_ranks = draw(st.integers(1, 4))
    size = draw(st.integers(-(-NUM_EXPERTS // num_ranks), NUM_EXPERTS))
    starts = [rank * size for rank in range(num_ranks + 1)]
    loads = draw(st.lists(st.integers(0, 50), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS))
    present = torch.full((starts[-1],), -1).numpy()
    return plan_layer(torch.tensor(loads).numpy(), starts, present).tolist(), starts


@given(maps(), st.integers(0, 3), st.booleans(), st.data())
def test_rows_take_slots_of_their_experts(found, rank, spread, data):
    experts, starts = found
    rows = data.draw(st.integers(0, 5))
    ids = data.draw(
        st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=2 * rows, max_size=2 * rows)
    )
    topk_idx = torch.tensor(ids, dtype=torch.int64).view(rows, 2)
    table = SlotTable.of(experts, starts, NUM_EXPERTS, rank, "cpu")
    slots = to_slots(topk_idx.clone(), table, spread)
    assert torch.equal(torch.tensor([*experts, -1])[slots], topk_idx)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.routing.expert_slots, "load_or_none", lambda: None)
        assert torch.equal(to_slots(topk_idx, table, spread), slots), "as without a compiler"


def test_spread_rows_take_all_copies_in_turn_and_ranks_begin_at_different_copies():
    experts, starts = [0, 1, 1, 0, 0, 1], [0, 2, 4, 6]
    taken = []
    for rank in range(3):
        table = SlotTable.of(experts, starts, 2, rank, "cpu")
        taken.append(to_slots(torch.zeros(6, 1, dtype=torch.int64), table, True).flatten())
        assert sorted(taken[-1].tolist()) == [0, 0, 3, 3, 4, 4]
    assert sorted(rows[0].item() for rows in taken) == [0, 3, 4]


def test_single_copies_are_spread_over_the_ranks():
    """Every expert has a copy on both ranks: half of the experts is taken from each."""
    table = SlotTable.of([0, 1, 2, 3, 0, 1, 2, 3], [0, 4, 8], 4, 0, "cpu")
    slots = to_slots(torch.arange(4).view(4, 1), table, False).flatten()
    assert sorted((slots >= 4).tolist()) == [False, False, True, True]


def test_a_table_takes_another_map_at_the_same_addresses():
    first = SlotTable.of([0, 1, 2, 3, 0], [0, 3, 5], 4, 1, "cpu")
    second = SlotTable.of([3, 1, 2, 3, 0], [0, 3, 5], 4, 1, "cpu")
    addresses = first.slots_EC.data_ptr(), first.copies_E.data_ptr()
    first.copy_from(second)
    assert addresses == (first.slots_EC.data_ptr(), first.copies_E.data_ptr())
    assert to_slots(torch.tensor([[0, 3]]), first, True).tolist() == [[4, 0]]


@given(st.integers(1, 40), st.integers(1, 12))
def test_the_table_of_the_identity_changes_nothing(num_experts, num_ranks):
    found = ContiguousMap(num_experts, num_ranks)
    table = SlotTable.of(found.experts(), found.starts, num_experts, 0, "cpu")
    ids = torch.arange(-1, num_experts).view(-1, 1)
    assert torch.equal(to_slots(ids.clone(), table, True), ids) and found.is_identity
