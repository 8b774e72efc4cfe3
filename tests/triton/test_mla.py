"""The kernels around latent attention (MLA) against the same arithmetic in float32 operators of torch."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from kernels.attention.fp8_latents import latent_parts
from kernels.attention.latent_cache import Fp8LatentCache
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from kernels.interface.kv_layout import layout_of
from kernels.triton.expand_keys import expand_keys
from kernels.triton.merge_attention import merge_attention
from kernels.triton.read_latents import read_latents
from kernels.triton.store_latents import store_latents
from tests.closeness import assert_near
from tests.triton.device import DEVICE
from workers.layers.rope import apply_rope

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
close = partial(assert_near, tolerances=TOLERANCE)
DTYPES = list(TOLERANCE)
# heads, n, r, C, v: DeepSeek-V3's with fewer heads, and sizes that are no powers of two
SIZES = [(20, 128, 64, 512, 128), (3, 6, 4, 12, 5), (4, 10, 2, 8, 16)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "nope", "rope", "rank", "value"), SIZES)
def test_store_latents(
    heads: int, nope: int, rope: int, rank: int, value: int, dtype: torch.dtype
) -> None:
    """Latents of rows that have a slot lie there as they are returned; nothing else is touched."""
    rows, width, blocks, block_size = 7, rank + rope, 4, 4
    wide = randn(rows, 10 + width, dtype=dtype)
    latent, q = wide[:, 10:], randn(rows, heads, nope + rope, dtype=dtype)
    weight, angles = randn(rank, dtype=dtype), randn(rows, 1, rope // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    slots = torch.tensor([5, -1, 15, 0, 6], device=DEVICE)  # the last two rows are padding
    cache = randn(blocks, block_size, width, dtype=dtype)
    parts = cache[..., :rank], cache[..., rank:]
    before, expected_cache = wide.clone(), cache.clone()
    expected_q = q.float()
    expected_q[..., nope:] = apply_rope(expected_q[..., nope:].clone(), rotation)
    normed = F.rms_norm(latent[:, :rank].float(), (rank,), weight.float(), 1e-6)
    key = apply_rope(latent[:, None, rank:].float().clone(), rotation)[:, 0]
    untouched = q[..., :nope].clone()
    store_latents(q, latent, weight, 1e-6, rotation, slots, *parts)
    close(q, expected_q)
    close(latent, torch.cat((normed, key), -1))
    assert torch.equal(wide[:, :10], before[:, :10]) and torch.equal(q[..., :nope], untouched)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_cache.view(-1, width)[slot] = latent[row]
    assert torch.equal(cache, expected_cache)


@pytest.mark.parametrize(("heads", "nope", "rope", "rank", "value"), SIZES)
def test_latents_in_fp8_are_stored_and_read_as_rounded(
    heads: int, nope: int, rope: int, rank: int, value: int
) -> None:
    """Rows are rounded in place; those that have a slot lie there and are read back, no other byte changes."""
    dtype, blocks, block_size = torch.bfloat16, 4, 4
    spec = AttentionSpec(
        heads, 1, nope + rope, 1.0, mla=MlaDims(rank, rope, nope, value), fp8_cache=True
    )
    latent, q = randn(7, rank + rope, dtype=dtype), randn(7, heads, nope + rope, dtype=dtype)
    weight, angles = randn(rank, dtype=dtype), randn(7, 1, rope // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    plain, plain_q = latent.clone(), q.clone()
    unrounded = randn(blocks, block_size, rank + rope, dtype=dtype)
    slots = [5, -1, 15, 0, 6]  # the last two rows are padding
    on_device = torch.tensor(slots, device=DEVICE)
    wide = unrounded[..., :rank], unrounded[..., rank:]
    store_latents(plain_q, plain, weight, 1e-6, rotation, on_device, *wide)
    shape = layout_of(spec).shape(blocks, block_size)
    cache = torch.full(shape, 7, dtype=torch.uint8, device=DEVICE)
    expected = cache.clone()
    parts = latent_parts(cache, spec, block_size)
    store_latents(q, latent, weight, 1e-6, rotation, on_device, *parts)
    assert torch.equal(q, plain_q)
    rounded = Fp8LatentCache(spec, expected, block_size).store(
        plain[[0, 2, 3, 4]], on_device[[0, 2, 3, 4]]
    )
    assert torch.equal(cache, expected)
    assert torch.equal(latent[[0, 2, 3, 4]], rounded)
    assert torch.equal(read_latents(parts, on_device[[4, 0, 3]]), latent[[4, 0, 3]])
    assert read_latents(parts, on_device[:0]).shape == (0, rank + rope)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [0, 5])
@pytest.mark.parametrize(("heads", "nope", "rope", "rank", "value"), SIZES)
def test_expand_keys(
    heads: int, nope: int, rope: int, rank: int, value: int, keys: int, dtype: torch.dtype
) -> None:
    kv, latents = (
        randn(keys, heads, nope + value, dtype=dtype),
        randn(keys, rank + rope, dtype=dtype),
    )
    found = expand_keys(kv, latents[:, rank:], nope)
    shared = latents[:, None, rank:].expand(-1, heads, -1)
    assert torch.equal(found, torch.cat((kv[..., :nope], shared), -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "value"), [(20, 128), (3, 5), (16, 256)])
def test_merged_attention_is_attention_over_all_keys(
    heads: int, value: int, dtype: torch.dtype
) -> None:
    """In three parts, the second without keys for some rows, the first without keys for one."""
    rows, counts = 5, (4, 6, 3)
    scores, v = randn(heads, rows, sum(counts)) * 3, randn(heads, sum(counts), value)
    scores[:, 1, 4:10] = -math.inf
    scores[:, 2, :10] = -math.inf
    expected = (scores.softmax(-1) @ v).transpose(0, 1)
    o = torch.zeros(rows, heads, value, dtype=dtype, device=DEVICE)
    lse = torch.full((rows, heads), -math.inf, device=DEVICE)
    for part, rows_v in zip(scores.split(counts, -1), v.split(counts, 1), strict=True):
        weights = part.softmax(-1).nan_to_num(0.0)
        other = (weights @ rows_v).transpose(0, 1).contiguous().to(dtype)
        other_lse = (part.logsumexp(-1) / math.log(2)).transpose(0, 1).contiguous()
        merge_attention(o, lse, other, other_lse)
        assert o.isfinite().all()
    close(o, expected)
    close(lse, (scores.logsumexp(-1) / math.log(2)).transpose(0, 1))


def test_two_sets_without_keys_stay_without() -> None:
    """Their log-sum-exps are -inf, and the difference of two of them would be NaN."""
    o, lse = torch.zeros(1, 2, 4, device=DEVICE), torch.full((1, 2), -math.inf, device=DEVICE)
    merge_attention(o, lse, o.clone(), lse.clone())
    assert not o.count_nonzero() and (lse == -math.inf).all()
