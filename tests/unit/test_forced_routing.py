"""Experts by a law: the right frequencies, never one twice for a token, whatever the batch and the ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.routing.forced_routing import ForcedRouting
from tests.unit.model_case import SMALL, OneRank, make_batch, small_checkpoint
from workers.config import ModelSection, RoutingConfig, not_for_answers

torch.set_num_threads(1)
NUM_EXPERTS, TOP_K = 32, 4
LAWS = ("uniform", "zipf", "balanced")


def law(name: str, exponent: float = 1.2, **changes: Any) -> ForcedRouting:
    values = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "rank": 0, "num_ranks": 1, "layer": 3}
    return ForcedRouting(name, exponent, **{**values, "device": "cpu", **changes})


def tokens(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids at positions 0 and on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50_000, (num_tokens,), generator=generator), torch.arange(num_tokens)


def counts(idx_TK: torch.Tensor, num_experts: int = NUM_EXPERTS) -> torch.Tensor:
    return idx_TK.flatten().bincount(minlength=num_experts)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(("num_experts", "top_k"), [(32, 4), (7, 3), (5, 5), (128, 8), (3, 1)])
def test_a_token_gets_different_experts_of_equal_weight(name: str, num_experts: int, top_k: int):
    route = law(name, num_experts=num_experts, top_k=top_k)
    idx_TK, weights_TK = route(*tokens(500), 490)
    assert idx_TK.shape == weights_TK.shape == (500, top_k)
    assert (idx_TK.dtype, weights_TK.dtype) == (torch.int64, torch.float32)
    real_TK = idx_TK[:490]
    assert ((real_TK >= 0) & (real_TK < num_experts)).all()
    assert all(len(set(row)) == top_k for row in real_TK.tolist())
    assert (idx_TK[490:] == -1).all() and (weights_TK == 1 / top_k).all()


def test_uniform_is_even():
    idx_TK, _ = law("uniform")(*tokens(40_000), 40_000)
    expected = 40_000 * TOP_K / NUM_EXPERTS
    assert (counts(idx_TK) - expected).abs().max() < 5 * expected**0.5
    pairs = idx_TK[:, 0] * NUM_EXPERTS + idx_TK[:, 1]  # no expert prefers another's company
    assert len(pairs.unique()) == NUM_EXPERTS * (NUM_EXPERTS - 1)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.5])
def test_zipf_has_its_exponent(exponent: float):
    idx_T1, _ = law("zipf", exponent, top_k=1)(*tokens(100_000), 100_000)
    found = counts(idx_T1).sort(descending=True).values.double()
    share = torch.arange(1, NUM_EXPERTS + 1).double().pow(-exponent)
    expected = 100_000 * share / share.sum()
    assert ((found - expected).abs() < 6 * expected.sqrt() + 1).all()


def test_zipf_draws_one_after_the_other():
    """The second expert is drawn from what the first left, in proportion to the weights."""
    idx_T2, _ = law("zipf", 1.0, num_experts=3, top_k=2, layer=0)(*tokens(60_000), 60_000)
    ranks = counts(idx_T2[:, 0], 3).argsort(descending=True).argsort()
    first, second = ranks[idx_T2].unbind(1)
    weight = torch.tensor([1.0, 1 / 2, 1 / 3]).double()
    for one in range(3):
        left = weight.clone()
        left[one] = 0
        found = counts(second[first == one], 3).double()
        assert ((found / found.sum() - left / left.sum()).abs() < 0.02).all()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 65, 256])
def test_balanced_is_even_in_every_step(num_ranks: int, num_tokens: int):
    total = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for rank in range(num_ranks):
        route = law("balanced", rank=rank, num_ranks=num_ranks)
        of_rank = counts(route(*tokens(num_tokens), num_tokens)[0])
        assert of_rank.max() - of_rank.min() <= 1
        total += of_rank
    assert total.max() - total.min() <= 1


@pytest.mark.parametrize("name", ["uniform", "zipf"])
def test_hangs_on_layer_position_and_token_alone(name: str):
    ids, positions = tokens(300)
    idx_TK, _ = law(name)(ids, positions, 300)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    shuffled, _ = law(name, rank=2, num_ranks=4)(ids[order], positions[order], 300)
    assert torch.equal(shuffled, idx_TK[order])
    for other in (
        law(name, layer=4)(ids, positions, 300),
        law(name)(ids + 1, positions, 300),
        law(name)(ids, positions + 1, 300),
    ):
        assert (other[0] != idx_TK).any(1).float().mean() > 0.9


def test_popular_experts_differ_between_layers():
    hottest = {
        int(counts(law("zipf", 2.0, layer=layer)(*tokens(2000), 2000)[0]).argmax())
        for layer in range(20)
    }
    assert len(hottest) > 8


@pytest.mark.parametrize("name", LAWS)
def test_a_model_is_routed_by_it(tmp_path: Path, name: str):
    """In a batch of several prompts as alone; other experts than the router's; padding reaches none."""
    path = small_checkpoint(tmp_path)
    forced = partial(
        law, name, num_experts=SMALL["num_experts"], top_k=SMALL["num_experts_per_tok"]
    )
    model = OneRank(path, forced_routing=forced)
    prompts = [[5, 6, 7, 8, 9], [250, 3, 77]]
    together = model.logits(make_batch(prompts, [0, 0], padding=3))
    alone = OneRank(path, forced_routing=forced).logits(make_batch(prompts[:1], [0]))
    torch.testing.assert_close(together[:5], alone, atol=1e-4, rtol=1e-4)
    assert (OneRank(path).logits(make_batch(prompts, [0, 0])) - together).abs().max() > 0.1


def test_people_are_told():
    path = {"path": "x"}
    assert not list(not_for_answers(ModelSection(**path)))
    zipf = RoutingConfig(kind="zipf", s=1.25)
    told = list(not_for_answers(ModelSection(**path, weights="dummy", routing=zipf)))
    assert "model.weights is dummy" in told[0]
    assert "model.routing.kind is zipf: zipf with s = 1.25" in told[1]
