"""K and V rounded to e4m3 by our kernels, beside the same in torch."""

from collections.abc import Sequence

import pytest
import torch

from kernels.attention.fp8_pages import Fp8Pages, round_heads, widen
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.kv_layout import layout_of
from kernels.triton.expand_fp8 import expand_fp8
from kernels.triton.fp8_heads import store_fp8
from kernels.triton.qk_rope import norm_rotate, norm_rotate_store
from tests.triton.device import DEVICE, compiled_only

BLOCK_SIZE, NUM_BLOCKS = 4, 5
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Heads of magnitudes from 2^-12 to 2^6."""
    generator = torch.Generator().manual_seed(sum(shape))
    scale = torch.randint(-12, 7, (*shape[:-1], 1), generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**scale).to(dtype).to(DEVICE)


def empty_pages(num_heads: int, head_dim: int) -> Fp8Pages:
    """Pages whose bytes are all 7."""
    spec = AttentionSpec(num_heads, num_heads, head_dim, 1.0, fp8_cache=True)
    shape = layout_of(spec).shape(NUM_BLOCKS, BLOCK_SIZE)
    return Fp8Pages(torch.full(shape, 7, dtype=torch.uint8, device=DEVICE), spec, BLOCK_SIZE)


def as_bytes(pages: Fp8Pages) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).cpu().clone() for tensor in pages.tensors]


def put(pages: Fp8Pages, slots: Sequence[int], k: torch.Tensor, v: torch.Tensor) -> None:
    """Write rounded rows to the slots that are not -1."""
    of = (k, pages.k, pages.k_exponents), (v, pages.v, pages.v_exponents)
    for rows, values, exponents in of:
        rounded, exponent = round_heads(rows)
        for row, slot in enumerate(slots):
            if slot >= 0:
                block, offset = divmod(slot, BLOCK_SIZE)
                values.view(torch.uint8)[block, offset] = rounded.view(torch.uint8)[row]
                exponents[block, :, offset] = exponent[row]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 32), (8, 128)])
def test_store_fp8(heads: int, head_dim: int, dtype: torch.dtype):
    """Rows of -1 and those behind the slots go nowhere, other slots stay; all rows are rounded."""
    qkv, slots = randn(6, 5 * heads, head_dim, dtype=dtype), [9, -1, 0, 19]
    qkv[2, heads] = 0
    k, v = qkv[:, heads : 2 * heads], qkv[:, 3 * heads : 4 * heads]
    others = qkv[:, :heads].clone()
    found, expected = empty_pages(heads, head_dim), empty_pages(heads, head_dim)
    put(expected, slots, k, v)
    rounded = [widen(*round_heads(x), dtype) for x in (k, v)]
    on_device = torch.tensor(slots, device=DEVICE)
    store_fp8(k, on_device, found.k, found.k_exponents)
    store_fp8(v, on_device, found.v, found.v_exponents)
    for one, other in zip(as_bytes(found), as_bytes(expected), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(k, rounded[0]) and torch.equal(v, rounded[1])
    assert torch.equal(qkv[:, :heads], others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("norm", "rotate"), [(False, False), *compiled_only((True, True), (False, True))]
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 64), (3, 3, 16), (4, 2, 128)])
def test_norm_rotate_store_rounds_what_it_would_have_stored(
    heads: int, kv_heads: int, head_dim: int, norm: bool, rotate: bool, dtype: torch.dtype
):
    rows, all_qk = 7, heads + kv_heads
    qkv = randn(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    weight = randn(all_qk, head_dim, dtype=dtype) if norm else None
    angles = torch.linspace(0, 3, rows * head_dim // 2).view(rows, 1, -1)
    rotation = torch.polar(torch.ones_like(angles), angles).to(DEVICE) if rotate else None
    slots = [5, -1, 15, 0, 6]  # the last two rows are padding
    expected, pages = qkv.clone(), empty_pages(kv_heads, head_dim)
    norm_rotate(expected[:, :all_qk], weight, 1e-6, rotation)
    wanted = empty_pages(kv_heads, head_dim)
    put(wanted, slots, expected[:, heads:all_qk], expected[:, all_qk:])
    expected[:, heads:] = widen(*round_heads(expected[:, heads:]), dtype)
    norm_rotate_store(
        qkv, weight, 1e-6, rotation, torch.tensor(slots, device=DEVICE), *pages.tensors
    )
    # Two kernels may contract products and sums of float32 in other ways; rounded rows hide that.
    close = {"atol": 1e-7, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(qkv[:, :heads], expected[:, :heads], **close)
    assert torch.equal(qkv[:, heads:], expected[:, heads:])
    for one, other in zip(as_bytes(pages), as_bytes(wanted), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 32), (2, 128)])
def test_expand_fp8(heads: int, head_dim: int, dtype: torch.dtype):
    """Sequences of 6, 1 and 4 tokens; an entry without rows writes nothing, nor do tokens behind a sequence."""
    pages = empty_pages(heads, head_dim)
    k, v = randn(20, heads, head_dim, dtype=dtype), randn(20, 2 * heads, head_dim, dtype=dtype)
    put(pages, range(20), k, v[:, heads:])
    wide = [widen(*round_heads(x), dtype) for x in (k, v[:, heads:])]
    entries = [(3, 0, 6), (1, 4, 6), (0, 9, 9), (4, 6, 7), (2, 7, 11)]  # page, first row, end
    numbers = torch.tensor(entries, dtype=torch.int32, device=DEVICE).T.contiguous()
    found = [torch.full((13, heads, head_dim), 5, dtype=dtype, device=DEVICE) for _ in "kv"]
    expand_fp8(pages.tensors, *numbers, *found)
    tokens = [12, 13, 14, 15, 4, 5, 16, 8, 9, 10, 11]
    for one, of in zip(found, wide, strict=True):
        assert torch.equal(one[:11], of[tokens])
        assert (one[11:] == 5).all()
