"""The fused kernels between matrix products against the same arithmetic in float32 operators of torch."""

import pytest
import torch
from torch.nn import functional as F

from kernels.fused import fused_kernels
from workers.layers.rope import apply_rope

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def fused():
    kernels = fused_kernels("cuda")
    assert kernels is not None, "triton comes with torch for CUDA"
    torch.manual_seed(1)
    return kernels


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def close(found: torch.Tensor, expected_f32: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected_f32, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 128), (7, 2048), (300, 2880), (5, 7168)])
def test_add_rms_norm(fused, rows: int, width: int, dtype: torch.dtype):
    x, delta, weight = randn(rows, width, dtype=dtype), randn(rows, width), randn(width)
    delta, weight = delta.to(dtype), weight.to(dtype)
    close(
        fused.add_rms_norm(x, None, weight, 1e-6),
        F.rms_norm(x.float(), (width,), weight.float(), 1e-6),
    )
    expected = x + delta
    normed = fused.add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(x, expected)
    close(normed, F.rms_norm(expected.float(), (width,), weight.float(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (6, 64), (36, 128), (9, 256)])
def test_norm_rotate(fused, heads: int, head_dim: int, dtype: torch.dtype):
    rows = 33
    wide = randn(rows, heads + 3, head_dim, dtype=dtype)
    weight = randn(heads, head_dim, dtype=dtype)
    angles = randn(rows, 1, head_dim // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    before = wide.clone()
    x = wide[:, :heads]
    normed = F.rms_norm(x.float(), (head_dim,), None, 1e-6) * weight.float()
    expected = apply_rope(normed, rotation)
    fused.norm_rotate(x, weight, 1e-6, rotation)
    close(x, expected)
    assert torch.equal(wide[:, heads:], before[:, heads:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (60, 4), (128, 8), (512, 10)])
def test_route_top_k(fused, experts: int, top_k: int, renormalise: bool, dtype: torch.dtype):
    rows, num_tokens = 129, 127
    # No two logits of a row are equal, also after rounding, so there is one right order.
    order = torch.rand(rows, experts, device="cuda").argsort(1)
    logits = ((order.float() - experts / 2) * 0.125).to(dtype)
    if dtype == torch.bfloat16 and experts > 256:
        logits = logits.float()
    weights, ids = torch.topk(logits.float(), top_k)
    weights = weights.softmax(-1) if renormalise else weights
    if not renormalise:
        weights = logits.float().softmax(-1).gather(1, ids)
    on_device = torch.tensor([num_tokens], device="cuda")
    for count in (num_tokens, on_device):
        found_ids, found_weights = fused.route_top_k(logits, top_k, renormalise, count)
        assert torch.equal(found_ids[:num_tokens], ids[:num_tokens])
        assert (found_ids[num_tokens:] == -1).all()
        torch.testing.assert_close(found_weights, weights, atol=1e-6, rtol=1e-5)


def test_equal_and_odd_logits_give_valid_experts(fused):
    logits = torch.zeros(5, 16, device="cuda")
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, 4:] = float("inf")
    logits[4, :8] = -0.0
    ids, _ = fused.route_top_k(logits, 4, True, 5)
    assert ids[0].tolist() == [0, 1, 2, 3] and ids[3].tolist() == [4, 5, 6, 7]
    for row in ids.tolist():
        assert len(set(row)) == 4 and all(0 <= expert < 16 for expert in row)
