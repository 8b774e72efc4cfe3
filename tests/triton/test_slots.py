"""Slots in the place of experts, in the kernels that choose experts: as kernels.routing.expert_slots gives them."""

import pytest
import torch

from kernels.routing.expert_slots import to_slots
from kernels.routing.forced_routing import ForcedRouting, noise_table
from kernels.slot_table import SlotTable
from kernels.triton.forced_route import forced_route
from kernels.triton.route import route_top_k
from kernels.triton.route_groups import route_groups
from tests.triton.device import DEVICE

EXPERTS, TOP_K, ROWS, TOKENS = 8, 3, 9, 7
MAPS = {
    "permuted": ([3, 1, 0, 2, 7, 6, 5, 4], (0, 4, 8)),
    "copies": ([0, 1, 2, 3, 7, 4, 5, 6, 7, 0, 1, 2, 0, 7], (0, 5, 10, 14)),
}


def places(name: str, device: str, rank: int = 1) -> SlotTable:
    experts, starts = MAPS[name]
    return SlotTable.of(experts, starts, EXPERTS, rank, device)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("name", list(MAPS))
@pytest.mark.parametrize("on_device", [False, True])
def test_kernels_give_the_slots_of_the_experts_that_they_choose(name, spread, on_device):
    torch.manual_seed(3)
    logits = torch.randn(ROWS, EXPERTS, device=DEVICE)
    count = torch.tensor([TOKENS], device=DEVICE) if on_device else TOKENS
    groups = {"num_groups": 4, "topk_group": 2, "group_score": "max", "norm_topk_prob": True}
    groups |= {"scoring_func": "sigmoid", "routed_scaling_factor": 1.0}
    ids, positions = torch.arange(ROWS), torch.arange(ROWS) * 7
    law = ForcedRouting(
        "uniform",
        1.0,
        num_experts=EXPERTS,
        top_k=TOP_K,
        rank=0,
        num_ranks=1,
        device="cpu",
        layer=2,
    )

    def by_law(**slots):
        return forced_route(
            ids.to(DEVICE),
            positions.to(DEVICE),
            law._table_E.to(DEVICE),
            noise_table(torch.device(DEVICE)),
            in_turn=False,
            layer=2,
            top_k=TOP_K,
            num_tokens=count,
            **slots,
        )

    for route in (
        lambda **slots: route_top_k(logits, TOP_K, True, count, **slots),
        lambda **slots: route_groups(logits, None, TOP_K, count, **groups, **slots),
        by_law,
    ):
        experts, weights = route()
        found, same_weights = route(table=places(name, DEVICE), spread=spread)
        expected = to_slots(experts.cpu().clone(), places(name, "cpu"), spread)
        assert found.dtype == torch.int64 and torch.equal(found.cpu(), expected)
        assert (found[TOKENS:] == -1).all() and torch.equal(weights, same_weights)
        in_slots = torch.tensor(MAPS[name][0])[found[:TOKENS].cpu()]
        assert torch.equal(in_slots, experts[:TOKENS].cpu()), "a slot holds the expert"
