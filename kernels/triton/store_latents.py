"""One Triton kernel between the projections of latent attention (MLA) and attention: norm, rotary embedding, cache.

T tokens, H query heads, n and r unrotated and rotated values of a head of q, d = n + r, C values of a latent,
W = C + r.
"""

import torch
import triton
import triton.language as tl

HEADS_PER_PROGRAM = 16


@triton.jit
def _turned(even, odd, cos, sin, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK]: the pairs (even, odd) times cos + i sin."""
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (ROWS, BLOCK))


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
    cache_ptr,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """Take the latent of one token in the first program of its row, HEADS heads of q in each other one."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    value = tl.arange(0, BLOCK_ROPE)[None, :]
    turns = tl.load(rotation_ptr + token * ROPE_DIM + value, mask=value < ROPE_DIM, other=0.0)
    cos, sin = tl.split(tl.reshape(turns, (1, BLOCK_ROPE // 2, 2)))
    if group == 0:
        row_ptr = latent_ptr + token * latent_row
        column = tl.arange(0, BLOCK_RANK)
        inside = column < RANK
        x_f32 = tl.load(row_ptr + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x_f32 * x_f32) / RANK + eps)
        normed = (x_f32 * factor * weight).to(latent_ptr.dtype.element_ty)
        key_at = row_ptr + RANK + value
        key = tl.load(key_at, mask=value < ROPE_DIM, other=0.0).to(tl.float32)
        key_even, key_odd = tl.split(tl.reshape(key, (1, BLOCK_ROPE // 2, 2)))
        key = _turned(key_even, key_odd, cos, sin, 1, BLOCK_ROPE)
        key = key.to(latent_ptr.dtype.element_ty)
        tl.store(row_ptr + column, normed, mask=inside)
        tl.store(key_at, key, mask=value < ROPE_DIM)
        slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
        slot_ptr = cache_ptr + slot * (RANK + ROPE_DIM)
        tl.store(slot_ptr + column, normed, mask=inside & (slot >= 0))
        tl.store(slot_ptr + RANK + value, key, mask=(value < ROPE_DIM) & (slot >= 0))
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
    cache: torch.Tensor,
) -> None:
    """Rotate the last r values of each head of q, norm and rotate the latents, in place; copy the latents to the cache.

    q          heads contiguous, any stride between rows, as for latent
    latent     [T, W]: a norm over the first C values, a rotation of the others
    rotation   complex64 [T, 1, r/2]: turns interleaved pairs
    slots      int64 [up to T], -1 for none; latents of rows beyond `slots` are not copied
    cache      [num_blocks, block_size, W], contiguous
    """
    num_rows, num_heads, head_dim = q_THd.shape
    rank, rope_dim = len(weight_C), 2 * rotation_T1r.shape[-1]
    assert q_THd.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    assert latent_TW.stride(1) == 1 and latent_TW.shape[1] == cache.shape[-1] == rank + rope_dim
    assert rotation_T1r.dtype == torch.complex64 and rotation_T1r.is_contiguous()
    assert cache.is_contiguous() and cache.dtype == latent_TW.dtype == q_THd.dtype
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
            cache,
            NUM_HEADS=num_heads,
            NOPE_DIM=head_dim - rope_dim,
            RANK=rank,
            ROPE_DIM=rope_dim,
            HEADS=heads,
            BLOCK_RANK=triton.next_power_of_2(rank),
            BLOCK_ROPE=triton.next_power_of_2(rope_dim),
            num_warps=2,
        )
