"""One Triton kernel between the QKV projection and attention: norm of each head, rotary embedding, KV write.

T tokens, H query heads, h KV heads, M = H + 2h, N = H + h heads of q and k, d head dim, r rotated values of a head.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.fp8_heads import place_both, round_heads
from kernels.triton.pdl import begin_last, dependent_launch

HEADS_PER_PROGRAM = 4


@triton.jit
def _rotate(y_f32, rotation_ptr, ROTARY_DIM: tl.constexpr):
    """Return heads [HEADS, BLOCK] with their first ROTARY_DIM values rotated."""
    half: tl.constexpr = y_f32.shape[1] // 2
    even, odd = tl.split(tl.reshape(y_f32, (y_f32.shape[0], half, 2)))
    value = tl.arange(0, 2 * half)
    if 2 * half == ROTARY_DIM:
        rotation = tl.load(rotation_ptr + value)
    else:  # values from ROTARY_DIM on are multiplied by 1 + 0i
        rotation = tl.load(rotation_ptr + value, mask=value < ROTARY_DIM, other=0.0)
        rotation += tl.where((value >= ROTARY_DIM) & (value % 2 == 0), 1.0, 0.0)
    cos, sin = tl.split(tl.reshape(rotation, (1, half, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (y_f32.shape[0], 2 * half))


@triton.jit(do_not_specialize=["slots_ptr", "num_tokens", "k_exponents_ptr", "v_exponents_ptr"])
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
    k_exponents_ptr,
    v_exponents_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    FP8_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take HEADS heads of one token per program.

    NORM: norm q and k. ROTARY_DIM: rotate as many values of each head. STORE: copy K and V to their slots.
    FP8_BLOCK: tokens of a block of a cache in e4m3, to which K and V are rounded in place too; 0: another cache.
    """
    begin_last(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    rotated_heads: tl.constexpr = NUM_HEADS + NUM_KV_HEADS  # values beyond a head are of none
    all_heads: tl.constexpr = rotated_heads + NUM_KV_HEADS if STORE else rotated_heads
    head = tl.where(dim < HEAD_DIM, head, all_heads) if BLOCK != HEAD_DIM else head
    at = x_ptr + token * x_row + head * HEAD_DIM + dim
    x = tl.load(at, mask=head < all_heads, other=0.0)
    y_f32 = x.to(tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + head * HEAD_DIM + dim, mask=head < rotated_heads, other=0.0)
        mean = tl.sum(y_f32 * y_f32, axis=1, keep_dims=True) / HEAD_DIM
        y_f32 = y_f32 * tl.rsqrt(mean + eps) * weight.to(tl.float32)
    y_f32 = _rotate(y_f32, rotation_ptr + token * ROTARY_DIM, ROTARY_DIM) if ROTARY_DIM else y_f32
    y = y_f32.to(x_ptr.dtype.element_ty)
    if NORM or ROTARY_DIM > 0:
        tl.store(at, y, mask=head < rotated_heads)
    if STORE:
        slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
        if FP8_BLOCK:
            kv, exponent, rounded = round_heads(tl.where(head < rotated_heads, y, x))
            tl.store(at, rounded.to(y.dtype), mask=(head >= NUM_HEADS) & (head < all_heads))
            x, y = kv, kv
            of = tl.program_id(1) * HEADS + tl.arange(0, HEADS) - NUM_HEADS
            to = (k_exponents_ptr, v_exponents_ptr)
            place_both(to, exponent, slot, of, NUM_KV_HEADS, FP8_BLOCK)
        row = slot * (NUM_KV_HEADS * HEAD_DIM) + dim
        is_key = (head >= NUM_HEADS) & (head < rotated_heads) & (slot >= 0)
        tl.store(k_slots_ptr + row + (head - NUM_HEADS) * HEAD_DIM, y, mask=is_key)
        is_value = (head >= rotated_heads) & (head < all_heads) & (slot >= 0)
        tl.store(v_slots_ptr + row + (head - rotated_heads) * HEAD_DIM, x, mask=is_value)


def norm_rotate_store(
    qkv_TMd: torch.Tensor,
    weight_Nd: torch.Tensor | None,
    eps: float,
    rotation_T1r: torch.Tensor | None,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *exponents: torch.Tensor,
) -> None:
    """Norm and rotate q and k in place, copy k and v into the cache.

    qkv       [T, H + 2h, d], heads contiguous
    weight    [H + h, d]; None: no norm
    rotation  complex64 [T, 1, r/2], r <= d: turns the first r values of each head in interleaved pairs;
              None: no rotation
    slots     int64 [up to T], -1 for none; K and V of rows beyond `slots` are not copied
    caches    [num_blocks, block_size, h, d]; in float8_e4m3fn k and v are rounded in place too
    exponents of k_cache and v_cache in float8_e4m3fn: uint8 [num_blocks, h, block_size]
    """
    num_kv_heads = k_cache.shape[2]
    num_heads = qkv_TMd.shape[1] - 2 * num_kv_heads
    store = (slots, k_cache, v_cache, *exponents)
    _launch(qkv_TMd, weight_Nd, eps, rotation_T1r, num_heads, num_kv_heads, store)


def norm_rotate(
    x_TNd: torch.Tensor,
    weight_Nd: torch.Tensor | None,
    eps: float,
    rotation_T1r: torch.Tensor | None,
) -> None:
    """Norm and rotate each head in place, as `norm_rotate_store` does q and k. Heads are contiguous."""
    _launch(x_TNd, weight_Nd, eps, rotation_T1r, x_TNd.shape[1], 0, None)


def _launch(
    x: torch.Tensor,
    weight_Nd: torch.Tensor | None,
    eps: float,
    rotation_T1r: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    store: tuple[torch.Tensor, ...] | None,
) -> None:
    num_rows, all_heads, head_dim = x.shape
    assert x.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    assert weight_Nd is None or weight_Nd.is_contiguous()
    block, rotary_dim, rotation = triton.next_power_of_2(head_dim), 0, x
    if rotation_T1r is not None:
        assert rotation_T1r.dtype == torch.complex64 and rotation_T1r.is_contiguous()
        rotary_dim, rotation = 2 * rotation_T1r.shape[-1], torch.view_as_real(rotation_T1r)
        assert rotary_dim <= head_dim, f"rotation of {rotary_dim} values, heads have {head_dim}"
    if not num_rows:
        return
    slots, k_cache, v_cache, *exponents = store or (x, x, x)
    _norm_rotate[(num_rows, triton.cdiv(all_heads, HEADS_PER_PROGRAM))](
        x,
        x.stride(0),
        x if weight_Nd is None else weight_Nd,
        rotation,
        eps,
        slots,
        len(slots),
        k_cache,
        v_cache,
        *(exponents or (slots, slots)),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        HEADS=HEADS_PER_PROGRAM,
        BLOCK=block,
        NORM=weight_Nd is not None,
        STORE=store is not None,
        FP8_BLOCK=k_cache.shape[1] if exponents else 0,
        **dependent_launch(num_rows),
        num_warps=1 if block <= 128 else 2,
    )
