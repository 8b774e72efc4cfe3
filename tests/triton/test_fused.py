"""The fused kernels between matrix products against the same arithmetic in float32 operators of torch."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from kernels.all2all.base import sum_partials
from kernels.fused import FusedKernels, fused_kernels
from kernels.triton.gated_norm import (
    gated_rms_norm,
    gated_rms_norm_fp8,
    output_gate,
    output_gate_fp8,
)
from kernels.triton.gated_sum import gated_sum
from kernels.triton.norm import add_rms_norm, add_rms_norm_fp8
from kernels.triton.qk_rope import norm_rotate, norm_rotate_store
from kernels.triton.quantise_rows import quantise_rows
from kernels.triton.route import route_top_k
from kernels.triton.route_groups import route_groups
from kernels.triton.skinny_linear import skinny_linear, takes_skinny
from tests.closeness import assert_near
from tests.in_turn import in_turn
from tests.triton.device import COMPILED, DEVICE, compiled_only
from workers.layers.rope import apply_rope

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
close = partial(assert_near, tolerances=TOLERANCE)
# The interpreter cuts bfloat16 off where a GPU rounds.
CUT_OFF = {} if COMPILED else {torch.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def rotations(rows: int, rotary_dim: int) -> torch.Tensor:
    """complex64 [T, 1, r/2] of length 1."""
    angles = randn(rows, 1, rotary_dim // 2)
    return torch.polar(torch.ones_like(angles), angles)


def head_norm(x_TNd: torch.Tensor, weight_Nd: torch.Tensor) -> torch.Tensor:
    """The norm of each head in float32."""
    return F.rms_norm(x_TNd.float(), x_TNd.shape[-1:], None, 1e-6) * weight_Nd.float()


def test_gpus_have_them():
    assert fused_kernels("cuda") == FusedKernels(
        add_rms_norm,
        add_rms_norm_fp8,
        norm_rotate,
        gated_rms_norm,
        gated_rms_norm_fp8,
        gated_sum,
        output_gate,
        output_gate_fp8,
        route_top_k,
        route_groups,
        takes_skinny,
        skinny_linear,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width"), [(0, 64), (1, 128), (7, 2048), *compiled_only((300, 2880)), (5, 7168)]
)
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype):
    x, delta = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
    weight = randn(width, dtype=dtype)
    close(
        add_rms_norm(x, None, weight, 1e-6),
        F.rms_norm(x.float(), (width,), weight.float(), 1e-6),
    )
    expected = x + delta
    normed = add_rms_norm(x, delta, weight, 1e-6)
    torch.testing.assert_close(x, expected, atol=0, rtol=CUT_OFF.get(dtype, 0))
    close(normed, F.rms_norm(expected.float(), (width,), weight.float(), 1e-6))


@pytest.mark.parametrize("width", [128, 384, 2048])
def test_add_rms_norm_fp8(width: int):
    """The norm, then the rounding to FP8, of sums of parts too. The norm itself is written on demand."""
    x, parts = randn(5, width), randn(2, 5, width)
    weight, another, plain = randn(width), x.clone(), torch.full_like(x, float("nan"))
    expected_x = x.clone()
    normed = add_rms_norm(expected_x, parts, weight, 1e-6)
    expected = quantise_rows(normed)
    found = add_rms_norm_fp8(x, parts, weight, 1e-6)
    both = add_rms_norm_fp8(another, parts, weight, 1e-6, plain)
    assert torch.equal(x, expected_x) and torch.equal(another, expected_x)
    torch.testing.assert_close(plain, normed, atol=1e-6, rtol=1e-6)
    assert torch.equal(both.values.float(), found.values.float())
    torch.testing.assert_close(both.scales, found.scales, atol=0, rtol=1e-6)
    assert torch.equal(found.values.float(), expected.values.float())
    torch.testing.assert_close(found.scales, expected.scales, atol=0, rtol=1e-6)
    assert found.scales.stride(0) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_multiply_by_a_gate(dtype: torch.dtype):
    """The rows that they return, whether these are in FP8 or not."""
    x, delta = randn(5, 384, dtype=dtype), randn(5, 384, dtype=dtype)
    weight, vector = randn(384, dtype=dtype), randn(384, dtype=dtype) / 16
    another, logits = x.clone(), randn(2, 5, 1, dtype=dtype)
    normed = add_rms_norm(x, delta, weight, 1e-6, None, (vector, logits[0]))
    plain = torch.empty_like(x)
    add_rms_norm_fp8(another, delta, weight, 1e-6, plain, (vector, logits[1]))
    close(logits[0], normed.float() @ vector.float()[:, None])
    close(logits[1], plain.float() @ vector.float()[:, None])
    assert torch.equal(x, another)


def test_norm_of_strided_rows_in_place():
    """As of all heads of q beside those of k and v."""
    wide, weight = randn(5, 96), randn(64)
    expected = wide.clone()
    expected[:, :64] = F.rms_norm(wide[:, :64], (64,), weight, 1e-6)
    add_rms_norm(wide[:, :64], None, weight, 1e-6, wide[:, :64])
    close(wide, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 2048])
def test_add_rms_norm_of_parts(width: int, dtype: torch.dtype):
    """What is added may be in parts: the same as with their sum. The result may go to strided rows."""
    x, parts, weight = randn(5, width, dtype=dtype), randn(3, 5, width, dtype=dtype), randn(width)
    weight = weight.to(dtype)
    delta, another = sum_partials(parts), x.clone()
    wide = torch.zeros(5, width + 8, dtype=dtype, device=DEVICE)
    out = add_rms_norm(x, parts, weight, 1e-6, wide[:, :width])
    assert out.data_ptr() == wide.data_ptr() and not wide[:, width:].any()
    expected = add_rms_norm(another, delta, weight, 1e-6)
    # The interpreter rounds otherwise than torch does.
    off = TOLERANCE[dtype] if CUT_OFF or dtype == torch.float32 else 0
    torch.testing.assert_close(x, another, atol=off, rtol=off)
    close(out, expected.float())


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    in_turn(3, [(1, 16), (6, 64), (36, 128), (9, 256), (3, 40), (5, 96)], DTYPES),
)
def test_norm_rotate(heads: int, head_dim: int, dtype: torch.dtype):
    rows = 33 if COMPILED else 5
    wide = randn(rows, heads + 3, head_dim, dtype=dtype)
    weight, rotation = randn(heads, head_dim, dtype=dtype), rotations(rows, head_dim)
    before = wide.clone()
    x = wide[:, :heads]
    expected = apply_rope(head_norm(x, weight), rotation)
    norm_rotate(x, weight, 1e-6, rotation)
    close(x, expected)
    assert torch.equal(wide[:, heads:], before[:, heads:])


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "norm", "dtype"),
    [
        *in_turn(3, [64, 80], [0, 16, 32, 48, 64], [True, False], DTYPES),
        (72, 72, False, torch.bfloat16),  # of a vision tower
    ],
)
def test_norm_and_rotation_are_optional(
    head_dim: int, rotary_dim: int, norm: bool, dtype: torch.dtype
):
    """No norm, no rotation, or a rotation of the first values of each head alone."""
    rows, heads = 5, 3
    x = randn(rows, heads, head_dim, dtype=dtype)
    weight = randn(heads, head_dim, dtype=dtype) if norm else None
    rotation = rotations(rows, rotary_dim) if rotary_dim else None
    expected = x.float() if weight is None else head_norm(x, weight)
    if rotation is not None:
        expected[..., :rotary_dim] = apply_rope(expected[..., :rotary_dim].clone(), rotation)
    norm_rotate(x, weight, 1e-6, rotation)
    close(x, expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norm", "rotate", "dtype"),
    in_turn(
        3,
        [(4, 1, 64), (8, 4, 128), (3, 3, 16), (4, 2, 96)],
        [(True, True), (False, True), (False, False)],
        DTYPES,
    ),
)
def test_norm_rotate_store(
    heads: int, kv_heads: int, head_dim: int, norm: bool, rotate: bool, dtype: torch.dtype
):
    """As norm_rotate, and K and V of rows that have a slot lie there; nothing else is touched."""
    rows, blocks, block_size = 7, 4, 4
    qkv = randn(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    weight = randn(heads + kv_heads, head_dim, dtype=dtype) if norm else None
    rotation = rotations(rows, head_dim) if rotate else None
    slots = torch.tensor([5, -1, 15, 0, 6], device=DEVICE)  # the last two rows are padding
    caches = [randn(blocks, block_size, kv_heads, head_dim, dtype=dtype) for _ in "kv"]
    before, caches_before = qkv.clone(), [cache.clone() for cache in caches]
    expected = before.clone()
    norm_rotate(expected[:, : heads + kv_heads], weight, 1e-6, rotation)
    norm_rotate_store(qkv, weight, 1e-6, rotation, slots, *caches)
    close(qkv, expected.float())
    assert torch.equal(qkv[:, heads + kv_heads :], before[:, heads + kv_heads :])
    for cache, first in zip(caches_before, (heads, heads + kv_heads), strict=True):
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache.view(-1, kv_heads, head_dim)[slot] = qkv[row, first : first + kv_heads]
    for cache, wanted in zip(caches, caches_before, strict=True):
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize(
    ("experts", "top_k", "norm_topk_prob", "dtype"),
    in_turn(3, [(8, 1), (60, 4), (128, 8), (512, 10)], [True, False], DTYPES),
)
def test_route_top_k(experts: int, top_k: int, norm_topk_prob: bool, dtype: torch.dtype):
    rows, num_tokens = (129, 127) if COMPILED else (9, 7)
    # No two logits of a row are equal, also after rounding, so there is one right order.
    order = torch.rand(rows, experts, device=DEVICE).argsort(1)
    logits = ((order.float() - experts / 2) * 0.125).to(dtype)
    if dtype == torch.bfloat16 and experts > 256:
        logits = logits.float()
    weights, ids = torch.topk(logits.float(), top_k)
    weights = weights.softmax(-1) if norm_topk_prob else weights
    if not norm_topk_prob:
        weights = logits.float().softmax(-1).gather(1, ids)
    on_device = torch.tensor([num_tokens], device=DEVICE)
    for count in (num_tokens, on_device):
        found_ids, found_weights = route_top_k(logits, top_k, norm_topk_prob, count)
        assert torch.equal(found_ids[:num_tokens], ids[:num_tokens])
        assert (found_ids[num_tokens:] == -1).all()
        torch.testing.assert_close(found_weights, weights, atol=1e-6, rtol=1e-5)
    scores = logits.float().sigmoid().gather(1, ids)
    scores = 2.5 * scores / (scores.sum(-1, keepdim=True) if norm_topk_prob else 1.0)
    found_ids, found_weights = route_top_k(
        logits, top_k, norm_topk_prob, rows, scoring_func="sigmoid", routed_scaling_factor=2.5
    )
    assert torch.equal(found_ids, ids)
    torch.testing.assert_close(found_weights, scores, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's of NaN
def test_equal_and_odd_logits_give_valid_experts():
    logits = torch.zeros(5, 16, device=DEVICE)
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, 4:] = float("inf")
    logits[4, :8] = -0.0
    ids, _ = route_top_k(logits, 4, True, 5)
    assert ids[0].tolist() == [0, 1, 2, 3] and ids[3].tolist() == [4, 5, 6, 7]
    for row in ids.tolist():
        assert len(set(row)) == 4 and all(0 <= expert < 16 for expert in row)


@pytest.mark.parametrize("dtype", [torch.float32, *compiled_only(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize(
    ("rows", "heads", "width"), [(0, 4, 16), (3, 4, 16), (2, 9, 24), *compiled_only((300, 32, 128))]
)
def test_gated_rms_norm(rows: int, heads: int, width: int, dtype: torch.dtype):
    x, wide = randn(rows, heads, width, dtype=dtype), randn(rows, 2 * heads * width, dtype=dtype)
    gate = wide[:, heads * width :].unflatten(1, (heads, width))
    weight = randn(width, dtype=dtype)
    normed = F.rms_norm(x.float(), (width,), None, 1e-6) * weight.float()
    expected = (normed * F.silu(gate.float())).flatten(1)
    close(gated_rms_norm(x, gate, weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads"), [(0, 4), (1, 4), (5, 9), *compiled_only((300, 32))])
def test_gated_rms_norm_in_fp8(rows: int, heads: int, dtype: torch.dtype):
    """Values are those of the norm and the kernel that quantises rows; a compiler may round a few sums otherwise."""
    x, wide = randn(rows, heads, 128, dtype=dtype), randn(rows, 3 * heads * 128, dtype=dtype)
    gate = wide[:, heads * 128 : 2 * heads * 128].unflatten(1, (heads, 128))
    weight = randn(128, dtype=dtype)
    expected = quantise_rows(gated_rms_norm(x, gate, weight, 1e-6))
    found = gated_rms_norm_fp8(x, gate, weight, 1e-6)
    unequal = (found.values.float() != expected.values.float()).sum()
    assert unequal <= (x.numel() // 1000 if COMPILED else 0)
    torch.testing.assert_close(
        found.scales, expected.scales, atol=0, rtol=2.0**-8 if COMPILED else 0
    )
    assert found.scales.stride() == expected.scales.stride()


@pytest.mark.parametrize("dtype", [torch.float32, *compiled_only(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize(
    ("rows", "width"), [(0, 128), (1, 128), (3, 384), *compiled_only((300, 4096))]
)
def test_output_gate(rows: int, width: int, dtype: torch.dtype):
    """The gate is a part of wider rows; in FP8 the values are those of the kernel that quantises rows."""
    x, wide = randn(rows, width, dtype=dtype), randn(rows, 3 * width, dtype=dtype)
    gate = wide[:, width : 2 * width]
    found = output_gate(x, gate)
    close(found, x.float() * gate.float().sigmoid())
    rounded, expected = output_gate_fp8(x, gate), quantise_rows(found)
    unequal = (rounded.values.float() != expected.values.float()).sum()
    assert unequal <= (x.numel() // 1000 if COMPILED else 0)
    torch.testing.assert_close(
        rounded.scales, expected.scales, atol=0, rtol=2.0**-8 if COMPILED else 0
    )


@pytest.mark.parametrize("dtype", [torch.float32, *compiled_only(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (5, 72), (3, 2880)])
def test_gated_sum(rows: int, width: int, dtype: torch.dtype):
    start, y = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
    logit, kept = randn(rows, 1, dtype=dtype), start.clone()
    found = gated_sum(start, y, logit)
    close(found, start.float() + y.float() * logit.float().sigmoid())
    assert torch.equal(start, kept)
