"""The dense C kernels against torch's operators, and the layers with and without them."""

import pytest
import torch
from torch.nn import functional as F

from kernels.native import dense
from kernels.native.dense import MAX_LINEAR_ROWS, MAX_LINEAR_WEIGHTS, dense_kernels
from kernels.native.library import native_unavailable
from workers.layers.linear import DenseLinear
from workers.layers.norm import RMSNorm
from workers.layers.rope import apply_rope, norm_and_rotate
from workers.layers.router import route_tokens
from workers.specs.model import RouterSpec

pytestmark = pytest.mark.skipif(native_unavailable() is not None, reason=str(native_unavailable()))


def kernels() -> dense.DenseKernels:
    found = dense_kernels("cpu", torch.float32)
    assert found is not None
    return found


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 7, 16])
@pytest.mark.parametrize(("width", "outs"), [(1, 1), (16, 4), (33, 7), (128, 258), (260, 3)])
def test_linear_with_every_start(num_rows, width, outs):
    torch.manual_seed(num_rows)
    x, w = torch.randn(num_rows, width), torch.randn(outs, width)
    bias, residual = torch.randn(outs), torch.randn(num_rows, outs)
    plain = F.linear(x, w)
    torch.testing.assert_close(kernels().linear(x, w, None), plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kernels().linear(x, w, bias), plain + bias, atol=1e-4, rtol=1e-4)
    kept = residual.clone()
    result = kernels().linear(x, w, residual)
    torch.testing.assert_close(result, plain + residual, atol=1e-4, rtol=1e-4)
    assert torch.equal(residual, kept), "the residual is not ours to change"


def test_what_is_large_or_strided_goes_to_the_library():
    few, many = torch.zeros(MAX_LINEAR_ROWS, 8), torch.zeros(MAX_LINEAR_ROWS + 1, 8)
    assert kernels().takes(few, torch.zeros(4, 8))
    assert not kernels().takes(many, torch.zeros(4, 8))
    assert not kernels().takes(few[:, ::2], torch.zeros(4, 4))
    assert not kernels().takes(few, torch.empty(MAX_LINEAR_WEIGHTS // 8 + 1, 8))
    w, residual = torch.randn(4, 8), torch.randn(MAX_LINEAR_ROWS + 1, 4)
    assert torch.equal(DenseLinear(w)(many, residual), residual)


def test_other_dtypes_have_no_kernels():
    assert dense_kernels("cpu", torch.bfloat16) is None
    assert dense_kernels("cuda", torch.float32) is None
    x, w = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)
    assert torch.equal(DenseLinear(w)(x), F.linear(x, w))


def norms(shape: tuple[int, ...]) -> tuple[RMSNorm, RMSNorm]:
    """The same norm with and without the kernels."""
    torch.manual_seed(0)
    scale = torch.randn(shape)
    made = []
    for with_kernels in (True, False):
        norm = RMSNorm(shape, 1e-5, device=torch.device("cpu"), dtype=torch.float32)
        norm.weight.copy_(scale).mul_(norm.load_scale)
        assert norm.native is not None
        if not with_kernels:
            norm.native = None
        made.append(norm)
    return made[0], made[1]


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e6])
def test_norm(scale):
    native, plain = norms((48,))
    x = torch.randn(5, 48) * scale
    torch.testing.assert_close(native(x), plain(x))
    assert torch.equal(native(x[:, :]), native(x)) and native(x[:0]).shape == (0, 48)


def test_norm_and_rotation_of_strided_heads():
    native, plain = norms((6, 8))
    rows = torch.randn(5, 9, 8)
    angles = torch.randn(5, 1, 4)
    rotation = torch.complex(angles.cos(), angles.sin())
    expected = apply_rope(plain(rows[:, :6], torch.float32), rotation)
    behind = rows[:, 6:].clone()
    got = norm_and_rotate(native, rows[:, :6], rotation)
    torch.testing.assert_close(got, expected)
    assert torch.equal(rows[:, 6:], behind), "heads behind the normed ones stay"


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (6, 6), (16, 4), (128, 8)])
def test_routing(monkeypatch, num_experts, top_k, norm_topk_prob):
    torch.manual_seed(top_k)
    x, router = torch.randn(9, 32), torch.randn(num_experts, 32)
    spec = RouterSpec(top_k=top_k, norm_topk_prob=norm_topk_prob)
    ids, weights = route_tokens(x, DenseLinear(router), spec, 7)
    monkeypatch.setattr("workers.layers.router.dense_kernels", lambda *_: None)
    other_ids, other_weights = route_tokens(x, DenseLinear(router), spec, 7)
    assert torch.equal(ids, other_ids) and ids.dtype == torch.int64
    torch.testing.assert_close(weights, other_weights)


def test_equal_logits_choose_different_experts_and_nan_stays_nan():
    ids, weights = kernels().route_top_k(torch.zeros(1, 6), 4, True)
    assert ids.tolist() == [[0, 1, 2, 3]] and torch.equal(weights, torch.full((1, 4), 0.25))
    ids, weights = kernels().route_top_k(torch.full((1, 6), float("nan")), 4, True)
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3] and weights.isnan().all()
