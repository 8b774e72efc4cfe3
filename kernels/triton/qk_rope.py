"""One Triton kernel for what stands between the QKV projection and attention: norm, rotary embedding, KV write.

T tokens, H query heads, h KV heads, N = H + h heads that are normalised and rotated, d head dim.
"""

import torch
import triton
import triton.language as tl

HEADS_PER_PROGRAM = 4


@triton.jit(do_not_specialize=["slots_ptr", "num_tokens"])
def _norm_rotate(
    x_ptr,
    x_row,
    weight_ptr,
    rotation_ptr,
    eps,
    slots_ptr,
    num_tokens,
    k_slots_ptr,
    v_slots_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    STORE: tl.constexpr,
):
    """A program takes HEADS heads of one token. STORE: K and V go to their slots as well."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    rotated_heads: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    all_heads: tl.constexpr = rotated_heads + NUM_KV_HEADS if STORE else rotated_heads
    at = x_ptr + token * x_row + head * HEAD_DIM + dim
    x = tl.load(at, mask=head < all_heads, other=0.0)
    x_f32 = x.to(tl.float32)
    weight_at = weight_ptr + head * HEAD_DIM + dim
    weight = tl.load(weight_at, mask=head < rotated_heads, other=0.0).to(tl.float32)
    mean = tl.sum(x_f32 * x_f32, axis=1, keep_dims=True) / HEAD_DIM
    normed = x_f32 * tl.rsqrt(mean + eps) * weight

    even, odd = tl.split(tl.reshape(normed, (HEADS, HEAD_DIM // 2, 2)))
    pair = tl.arange(0, HEAD_DIM)
    rotation = tl.load(rotation_ptr + token * HEAD_DIM + pair)
    cos, sin = tl.split(tl.reshape(rotation, (1, HEAD_DIM // 2, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    y = tl.reshape(turned, (HEADS, HEAD_DIM)).to(x_ptr.dtype.element_ty)
    tl.store(at, y, mask=head < rotated_heads)
    if STORE:
        slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
        row = slot * (NUM_KV_HEADS * HEAD_DIM) + dim
        is_key = (head >= NUM_HEADS) & (head < rotated_heads) & (slot >= 0)
        tl.store(k_slots_ptr + row + (head - NUM_HEADS) * HEAD_DIM, y, mask=is_key)
        is_value = (head >= rotated_heads) & (head < all_heads) & (slot >= 0)
        tl.store(v_slots_ptr + row + (head - rotated_heads) * HEAD_DIM, x, mask=is_value)


def norm_rotate_store(
    qkv_TMd: torch.Tensor,
    weight_Nd: torch.Tensor,
    eps: float,
    rotation_T1d: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Norm and rotate q and k in place, copy k and v into the cache.

    qkv       [T, H + 2h, d], heads contiguous
    weight    [H + h, d]; rotation complex64 [T, 1, d/2] of interleaved pairs
    slots     int64 [up to T], -1 for none; rows beyond have none
    caches    [num_blocks, block_size, h, d]
    """
    num_kv_heads = k_cache.shape[2]
    num_heads = qkv_TMd.shape[1] - 2 * num_kv_heads
    store = (slots, k_cache, v_cache)
    _launch(qkv_TMd, weight_Nd, eps, rotation_T1d, num_heads, num_kv_heads, store)


def norm_rotate(
    x_TNd: torch.Tensor, weight_Nd: torch.Tensor, eps: float, rotation_T1d: torch.Tensor
) -> None:
    """Norm each head with its weight, then rotate its interleaved pairs; in place. Heads are contiguous."""
    _launch(x_TNd, weight_Nd, eps, rotation_T1d, x_TNd.shape[1], 0, None)


def _launch(
    x: torch.Tensor,
    weight_Nd: torch.Tensor,
    eps: float,
    rotation_T1d: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    store: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    num_rows, all_heads, head_dim = x.shape
    assert x.stride()[1:] == (head_dim, 1) and weight_Nd.is_contiguous()
    assert rotation_T1d.dtype == torch.complex64 and rotation_T1d.is_contiguous()
    if not num_rows:
        return
    slots, k_cache, v_cache = store or (x, x, x)
    _norm_rotate[(num_rows, triton.cdiv(all_heads, HEADS_PER_PROGRAM))](
        x,
        x.stride(0),
        weight_Nd,
        torch.view_as_real(rotation_T1d),
        eps,
        slots,
        len(slots),
        k_cache,
        v_cache,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEADS=HEADS_PER_PROGRAM,
        STORE=store is not None,
        num_warps=1 if head_dim <= 128 else 2,
    )
