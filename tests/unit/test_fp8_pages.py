"""K and V in e4m3: rounding with a power-of-two scale for each token and head, and the views of a cache."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.fp8_pages import ONE_SIDE, Fp8Pages, power_of_two, round_heads, widen
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.kv_layout import PagedFp8Heads, PagedHeads, layout_of

SPEC = AttentionSpec(4, 2, 8, 0.35, fp8_cache=True)


def rounded(x_Thd: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return widen(*round_heads(x_Thd), dtype)


@given(st.integers(-80, 100), st.integers(0, 2**31))
@settings(max_examples=60)
def test_values_keep_four_bits_at_any_scale(power: int, seed: int) -> None:
    x_Thd = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    x_Thd = torch.clamp(x_Thd, -3e38, 3e38)
    error = (rounded(x_Thd) - x_Thd).abs()
    largest = x_Thd.abs().amax(-1, keepdim=True)
    assert (error <= torch.maximum(x_Thd.abs() / 16, largest * 2.0**-17)).all()
    values, _ = round_heads(x_Thd)
    assert (values.float().abs().amax(-1) >= 128).all()
    assert (values.float().abs() <= 256).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_rows_are_exact_and_stay(dtype: torch.dtype) -> None:
    """So a token's K and V are the same whether they are read as new rows or from the cache."""
    x_Thd = torch.randn(64, 2, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    once = rounded(x_Thd, dtype)
    assert torch.equal(once.float(), rounded(x_Thd))
    assert torch.equal(rounded(once, dtype), once)


@pytest.mark.parametrize("value", [0.0, 1e-38, 3.1e38, 1.0, 255.9, 448.0, 511.0])
def test_extreme_heads(value: float) -> None:
    x_Thd = torch.full((1, 1, 4), value)
    x_Thd[0, 0, 1] = 0
    found = rounded(x_Thd)
    assert found[0, 0, 1] == 0 and found.isfinite().all()
    torch.testing.assert_close(found, x_Thd, rtol=1 / 16, atol=1e-37)


def test_inverse_scales_of_zeros_add_up() -> None:
    """Attention divides by the sum of weights, in which each key of a long sequence has its inverse scale of V."""
    _, exponents = round_heads(torch.zeros(1, 1, 4))
    inverse = power_of_two(ONE_SIDE - exponents.int())
    assert (2**24 * inverse).isfinite().all()


def test_what_is_not_finite_stays_so() -> None:
    x_Thd = torch.ones(1, 2, 4)
    x_Thd[0, 0, 2], x_Thd[0, 1, 2] = math.nan, math.inf
    assert not rounded(x_Thd)[0, :, 2].isfinite().any()


def test_the_views_of_a_cache_share_no_byte_and_leave_none() -> None:
    layout = layout_of(SPEC)
    assert layout == PagedFp8Heads(2, 8)
    assert layout.block_bytes(16, 4) == 2 * 16 * 2 * (8 + 1)
    assert PagedHeads(2, 8).block_bytes(16, 2) == 2 * 16 * 2 * 8 * 2
    cache = torch.zeros(layout.shape(3, 16), dtype=torch.uint8)
    pages = Fp8Pages(cache, SPEC, 16)
    assert pages.k.shape == pages.v.shape == (3, 16, 2, 8)
    assert pages.k_exponents.shape == pages.v_exponents.shape == (3, 2, 16)
    for number, tensor in enumerate(pages.tensors):
        assert tensor.is_contiguous()
        tensor.view(torch.uint8).add_(number + 1)
    counts = torch.bincount(cache.long()).tolist()
    assert counts == [0, *(tensor.numel() for tensor in pages.tensors)]


def test_powers_of_two() -> None:
    assert power_of_two(torch.tensor([127, 128, 120], dtype=torch.int32)).tolist() == [
        1,
        2,
        1 / 128,
    ]
