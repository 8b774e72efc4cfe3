"""One Triton kernel between the projections of latent attention (MLA) and attention: norm, rotary embedding, cache.

T tokens, H query heads, n and r unrotated and rotated values of a head of q, d = n + r, C values of a latent,
W = C + r.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.fp8_heads import round_heads

HEADS_PER_PROGRAM = 16


@triton.jit
def _turned(even, odd, cos, sin, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK]: the pairs (even, odd) times cos + i sin."""
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (ROWS, BLOCK))


@triton.jit
def _norm_latent(
    row_ptr,
    weight_ptr,
    eps,
    of_slot,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    FP8: tl.constexpr,
):
    """Norm a latent in place, with FP8 round it, and copy it to its slot, if it has one."""
    values_ptr, exponent_ptr, has_slot = of_slot
    column = tl.arange(0, BLOCK_RANK)
    inside = column < RANK
    x_f32 = tl.load(row_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x_f32 * x_f32) / RANK + eps)
    normed = (x_f32 * factor * weight).to(row_ptr.dtype.element_ty)
    stored = normed
    if FP8:
        values, exponent, rounded = round_heads(normed[None, :])
        stored = tl.reshape(values, (BLOCK_RANK,))
        normed = tl.reshape(rounded, (BLOCK_RANK,)).to(row_ptr.dtype.element_ty)
        tl.store(exponent_ptr + tl.arange(0, 1), exponent.to(tl.uint8), mask=has_slot)
    tl.store(row_ptr + column, normed, mask=inside)
    tl.store(values_ptr + column, stored, mask=inside & has_slot)


@triton.jit(do_not_specialize=["slots_ptr", "num_tokens"])
def _store_latents(
    q_ptr,
    q_row,
    latent_ptr,
    latent_row,
    weight_ptr,
    rotation_ptr,
    eps,
    slots_ptr,
    num_tokens,
    values_ptr,
    values_row,
    keys_ptr,
    keys_row,
    exponents_ptr,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Take the latent of one token in the first program of its row, HEADS heads of q in each other one."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    value = tl.arange(0, BLOCK_ROPE)[None, :]
    turns = tl.load(rotation_ptr + token * ROPE_DIM + value, mask=value < ROPE_DIM, other=0.0)
    cos, sin = tl.split(tl.reshape(turns, (1, BLOCK_ROPE // 2, 2)))
    if group == 0:
        row_ptr = latent_ptr + token * latent_row
        slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
        values_ptr += slot * values_row
        of_slot = (values_ptr, exponents_ptr + slot, slot >= 0)
        _norm_latent(row_ptr, weight_ptr, eps, of_slot, RANK, BLOCK_RANK, FP8)
        key_at = row_ptr + RANK + value
        key = tl.load(key_at, mask=value < ROPE_DIM, other=0.0).to(tl.float32)
        key_even, key_odd = tl.split(tl.reshape(key, (1, BLOCK_ROPE // 2, 2)))
        key = _turned(key_even, key_odd, cos, sin, 1, BLOCK_ROPE)
        key = key.to(latent_ptr.dtype.element_ty)
        tl.store(key_at, key, mask=value < ROPE_DIM)
        key = key.to(keys_ptr.dtype.element_ty)
        tl.store(keys_ptr + slot * keys_row + value, key, mask=(value < ROPE_DIM) & (slot >= 0))
    else:
        head = (group - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        at = q_ptr + token * q_row + head * (NOPE_DIM + ROPE_DIM) + NOPE_DIM + value
        mask = (head < NUM_HEADS) & (value < ROPE_DIM)
        heads = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(heads, (HEADS, BLOCK_ROPE // 2, 2)))
        turned = _turned(even, odd, cos, sin, HEADS, BLOCK_ROPE)
        tl.store(at, turned.to(q_ptr.dtype.element_ty), mask=mask)


def store_latents(
    q_THd: torch.Tensor,
    latent_TW: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    rotation_T1r: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    keys: torch.Tensor,
    exponents: torch.Tensor | None = None,
) -> None:
    """Rotate the last r values of each head of q, norm and rotate the latents, in place; copy the latents to the cache.

    A cache in e4m3 rounds the latents in place too (kernels/attention/fp8_latents.py).

    q          heads contiguous, any stride between rows, as for latent
    latent     [T, W]: a norm over the first C values, a rotation of the others
    rotation   complex64 [T, 1, r/2]: turns interleaved pairs
    slots      int64 [up to T], -1 for none; latents of rows beyond `slots` are not copied
    values     [num_blocks, block_size, C], tokens at equal distances, in latent's dtype; with exponents float8_e4m3fn
    keys       [num_blocks, block_size, r], likewise, of a float dtype
    exponents  uint8 [num_blocks, block_size], contiguous
    """
    num_rows, num_heads, head_dim = q_THd.shape
    rank, rope_dim = len(weight_C), 2 * rotation_T1r.shape[-1]
    assert q_THd.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    assert latent_TW.stride(1) == 1 and latent_TW.shape[1] == rank + rope_dim
    assert (values.shape[-1], keys.shape[-1]) == (rank, rope_dim)
    assert all(
        it.stride(2) == 1 and it.stride(0) == it.shape[1] * it.stride(1) for it in (values, keys)
    )
    assert rotation_T1r.dtype == torch.complex64 and rotation_T1r.is_contiguous()
    assert latent_TW.dtype == q_THd.dtype
    if num_rows:
        heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
        _store_latents[(num_rows, 1 + triton.cdiv(num_heads, heads))](
            q_THd,
            q_THd.stride(0),
            latent_TW,
            latent_TW.stride(0),
            weight_C,
            torch.view_as_real(rotation_T1r),
            eps,
            slots,
            len(slots),
            values,
            values.stride(1),
            keys,
            keys.stride(1),
            keys if exponents is None else exponents,
            NUM_HEADS=num_heads,
            NOPE_DIM=head_dim - rope_dim,
            RANK=rank,
            ROPE_DIM=rope_dim,
            HEADS=heads,
            BLOCK_RANK=triton.next_power_of_2(rank),
            BLOCK_ROPE=triton.next_power_of_2(rope_dim),
            FP8=exponents is not None,
            num_warps=2,
        )
