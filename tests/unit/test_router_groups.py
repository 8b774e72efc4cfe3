"""Routers with a bias for the choice, and with groups of experts, against plain Python."""

import math

import pytest
import torch

from workers.layers.linear import DenseLinear
from workers.layers.router import route_tokens
from workers.specs.model import RouterSpec

torch.set_num_threads(1)

NUM_EXPERTS = 12
SPECS = [
    RouterSpec(
        top_k=top_k,
        norm_topk_prob=norm_topk_prob,
        scoring_func=score,
        routed_scaling_factor=scaling,
        bias=bias,
        num_groups=groups,
        topk_group=topk_group,
        group_score=group_score,
    )
    for score, bias, group_score in (
        ("sigmoid", True, "top2"),
        ("softmax", False, "max"),
        ("softmax", True, "max"),
    )
    for groups, topk_group, top_k in ((1, 1, 4), (4, 2, 4), (6, 3, 5), (3, 3, 2))
    for norm_topk_prob, scaling in ((True, 2.5), (False, 16.0))
    if bias or topk_group < groups
]


def choose(logits: list[float], bias: list[float], spec: RouterSpec) -> tuple[list[int], list]:
    """Return the experts of one token, best first, and their weights."""
    if spec.scoring_func == "softmax":
        total = math.fsum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = NUM_EXPERTS // spec.num_groups
    groups = [range(first, first + size) for first in range(0, NUM_EXPERTS, size)]
    counted = 2 if spec.group_score == "top2" else 1
    groups.sort(key=lambda group: -sum(sorted(choice[e] for e in group)[-counted:]))
    open_experts = [e for group in groups[: spec.topk_group] for e in group]
    best = sorted(open_experts, key=lambda e: -choice[e])[: spec.top_k]
    total = math.fsum(scores[e] for e in best) if spec.norm_topk_prob else 1.0
    return best, [spec.routed_scaling_factor * scores[e] / total for e in best]


@pytest.mark.parametrize("offset", [0.0, -5.0], ids=["bias", "negative"])
@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.scoring_func}-{s.topk_group}of{s.num_groups}"
)
def test_choice_and_weights(spec: RouterSpec, offset: float) -> None:
    """A large negative bias: closed groups masked with 0 would win. Weights are of scores without bias."""
    generator = torch.Generator().manual_seed(4)
    x_TD, router_ED = (torch.randn(n, 10, generator=generator) for n in (9, NUM_EXPERTS))
    bias_E = torch.randn(NUM_EXPERTS, generator=generator) * 0.3 + offset if spec.bias else None
    idx_TK, weights_TK = route_tokens(x_TD, DenseLinear(router_ED), spec, 7, bias_E)
    assert idx_TK.dtype == torch.int64 and weights_TK.dtype == torch.float32
    extra = [0.0] * NUM_EXPERTS if bias_E is None else bias_E.tolist()
    for token in range(7):
        logits = (router_ED.double() @ x_TD[token].double()).tolist()
        best, expected = choose(logits, extra, spec)
        assert idx_TK[token].tolist() == best
        assert weights_TK[token].tolist() == pytest.approx(expected, rel=1e-4)
    assert (idx_TK[7:] == -1).all()


def test_the_number_of_tokens_may_be_a_tensor() -> None:
    """A captured graph reads it at each replay."""
    spec = RouterSpec(top_k=2, norm_topk_prob=True, scoring_func="sigmoid", bias=True)
    x_TD, router_ED = torch.randn(5, 10), torch.randn(6, 10)
    idx_TK, _ = route_tokens(x_TD, DenseLinear(router_ED), spec, torch.tensor([3]), torch.zeros(6))
    assert (idx_TK[:3] >= 0).all() and (idx_TK[3:] == -1).all()


def test_close_scores_in_bfloat16_are_told_apart() -> None:
    """Logits that bfloat16 would round to one value choose by their float32 values."""
    spec = RouterSpec(top_k=1, norm_topk_prob=False, scoring_func="sigmoid", bias=True)
    x_TD = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    router_ED = torch.tensor([[0.03125, 0.0], [0.03125, 0.015625]], dtype=torch.bfloat16)
    idx_TK, _ = route_tokens(x_TD, DenseLinear(router_ED), spec, 1, torch.zeros(2))
    assert idx_TK.item() == 1
