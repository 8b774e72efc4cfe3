"""The router with a bias for the choice and closed groups against torch's operators."""

from dataclasses import replace

import pytest
import torch

from kernels.triton.route_groups import route_groups
from tests.triton.device import COMPILED, DEVICE
from workers.layers.router import choose_in_groups
from workers.specs.model import RouterSpec

V3 = RouterSpec(
    top_k=8,
    norm_topk_prob=True,
    scoring_func="sigmoid",
    routed_scaling_factor=2.5,
    bias=True,
    num_groups=8,
    topk_group=4,
    group_score="top2",
)
V2 = RouterSpec(
    top_k=6, norm_topk_prob=False, routed_scaling_factor=16.0, num_groups=8, topk_group=3
)
# Experts, and the routers of DeepSeek-V3 and V2, Kimi-K2, ERNIE, and two with groups of no power of two.
ROUTERS = [
    (256, V3),
    (160, V2),
    (384, replace(V3, num_groups=1, topk_group=1, routed_scaling_factor=2.827)),
    (64, RouterSpec(top_k=6, norm_topk_prob=True, bias=True)),
    (10, replace(V3, top_k=3, num_groups=5, topk_group=2)),
    (9, replace(V3, top_k=2, num_groups=3, topk_group=1)),
]
FIELDS = (
    "num_groups",
    "topk_group",
    "group_score",
    "norm_topk_prob",
    "scoring_func",
    "routed_scaling_factor",
)


@pytest.mark.parametrize(("experts", "spec"), ROUTERS)
def test_equals_torch(experts: int, spec: RouterSpec) -> None:
    """Biases are of both signs and large, so that they change the choice and close groups below 0."""
    rows, num_tokens = (129, 127) if COMPILED else (9, 7)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, experts, generator=generator).to(DEVICE)
    bias = torch.randn(experts, generator=generator).to(DEVICE) if spec.bias else None
    ids, weights = choose_in_groups(logits, spec, bias)
    options = {name: getattr(spec, name) for name in FIELDS}
    for count in (num_tokens, torch.tensor([num_tokens], device=DEVICE)):
        found_ids, found_weights = route_groups(logits, bias, spec.top_k, count, **options)
        assert torch.equal(found_ids[:num_tokens], ids[:num_tokens])
        assert (found_ids[num_tokens:] == -1).all()
        torch.testing.assert_close(found_weights, weights, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's of NaN
def test_odd_logits_give_different_experts() -> None:
    logits = torch.zeros(4, 16, device=DEVICE)
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, 4:] = float("inf")
    spec = replace(V3, top_k=4, num_groups=4, topk_group=2)
    options = {name: getattr(spec, name) for name in FIELDS}
    ids, _ = route_groups(logits, None, 4, 4, **options)
    for row in ids.tolist():
        assert len(set(row)) == 4 and all(0 <= expert < 16 for expert in row)


def test_too_few_open_experts_are_an_error() -> None:
    spec = replace(V3, top_k=5, num_groups=4, topk_group=1)
    options = {name: getattr(spec, name) for name in FIELDS}
    with pytest.raises(AssertionError, match="too few experts"):
        route_groups(torch.zeros(1, 16, device=DEVICE), None, 5, 1, **options)
