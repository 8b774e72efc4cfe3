"""Norm, rotary embedding and router against plain formulas, in the forms of every device."""

import math

import pytest
import torch

from workers.layers.linear import DenseLinear
from workers.layers.norm import RMSNorm
from workers.layers.rope import apply_rope, build_rope_table
from workers.layers.router import route_tokens
from workers.specs.model import GqaSpec, LayerSpec, ModelConfig, MoeSpec, RouterSpec
from workers.specs.rope import RopeSpec
from workers.weights.slots import WeightSlot

torch.set_num_threads(1)
CPU = torch.device("cpu")


def make_norm(
    shape: tuple[int, ...], weight: torch.Tensor, eps: float, *, dtype: torch.dtype, fused: bool
) -> RMSNorm:
    norm = RMSNorm(shape, eps, device=CPU, dtype=dtype, fused=fused)
    WeightSlot.plain(norm.weight, norm.load_scale).fill(weight)
    return norm


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(24,), (3, 24)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_norm(fused: bool, dtype: torch.dtype, shape: tuple[int, ...], eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    wide = torch.randn(5, 4, 24, generator=generator).to(dtype)
    wide[0] = 0
    x = wide[:, : shape[0]] if len(shape) == 2 else wide[:, 0]  # strided, as q and k heads are
    x_f64 = x.double()
    expected = x_f64 / (x_f64.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    got = make_norm(shape, weight, eps, dtype=dtype, fused=fused)(x)
    assert got.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_norm_leaves_its_input_and_keeps_float32_on_request() -> None:
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    before = x.clone()
    norm = make_norm((8,), torch.ones(8), 1e-6, dtype=torch.bfloat16, fused=False)
    assert norm(x, torch.float32).dtype == torch.float32
    assert torch.equal(x, before)


def config_of(rope: RopeSpec, head_dim: int) -> ModelConfig:
    moe = MoeSpec(
        num_experts=2,
        intermediate_size=8,
        activation="silu",
        router=RouterSpec(top_k=1, norm_topk_prob=True),
    )
    attention = GqaSpec(num_heads=2, num_kv_heads=1, head_dim=head_dim, rope=rope)
    return ModelConfig(
        model_type="none",
        vocab_size=8,
        hidden_size=8,
        layers=(LayerSpec(attention=attention, mlp=moe),),
        moe=moe,
        max_position_embeddings=512,
        norm_eps=1e-6,
        tie_word_embeddings=False,
        dtype="float32",
        eos_token_ids=(),
        quantization=None,
        weight_entries=lambda config: iter(()),
    )


def test_rope_turns_pairs_of_a_permuted_head() -> None:
    head_dim, theta = 12, 300.0
    table = build_rope_table(config_of(RopeSpec(rope_theta=theta), head_dim), 512, CPU)
    positions = torch.tensor([0, 1, 77, 511])
    x = torch.randn(4, 2, head_dim, generator=torch.Generator().manual_seed(1))
    angles = positions[:, None].double() / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = angles.cos()[:, None].float(), angles.sin()[:, None].float()
    low, high = x.chunk(2, -1)
    expected = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    paired = torch.stack((low, high), -1).flatten(-2)
    got = apply_rope(paired.clone(), table.index_select(0, positions).unsqueeze(1))
    unpaired = got.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(unpaired, expected, atol=2e-5, rtol=0)


ROUTERS = [
    RouterSpec(
        top_k=top_k,
        norm_topk_prob=norm_topk_prob,
        scoring_func=score,
        routed_scaling_factor=scaling,
    )
    for score, scaling in (("softmax", 1.0), ("sigmoid", 1.0), ("sigmoid", 2.5), ("softmax", 16.0))
    for norm_topk_prob in (True, False)
    for top_k in (1, 3, 6)
]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "spec", ROUTERS, ids=lambda spec: f"{spec.scoring_func}-{spec.routed_scaling_factor}"
)
@pytest.mark.parametrize("num_tokens", [0, 4, 7])
def test_router(
    spec: RouterSpec, num_tokens: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("workers.layers.router.dense_kernels", lambda *_: None)
    generator = torch.Generator().manual_seed(2)
    x_TD, router_ED = (torch.randn(n, 10, generator=generator) for n in (7, 6))
    idx_TK, weights_TK = route_tokens(x_TD, DenseLinear(router_ED), spec, num_tokens)
    assert idx_TK.dtype == torch.int64 and weights_TK.dtype == torch.float32
    for token in range(num_tokens):
        logits = (router_ED.double() @ x_TD[token].double()).tolist()
        scores = [
            math.exp(x) if spec.scoring_func == "softmax" else 1 / (1 + math.exp(-x))
            for x in logits
        ]
        best = sorted(range(6), key=lambda e: -scores[e])[: spec.top_k]
        assert idx_TK[token].tolist() == best
        total = math.fsum(scores) if spec.scoring_func == "softmax" else 1.0
        if spec.norm_topk_prob:
            total = math.fsum(scores[e] for e in best)
        expected = [spec.routed_scaling_factor * scores[e] / total for e in best]
        assert weights_TK[token].tolist() == pytest.approx(expected, abs=1e-5)
    assert (idx_TK[num_tokens:] == -1).all()
