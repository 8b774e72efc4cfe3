"""One Triton kernel for a decode step of gated delta nets: convolution, norms, gates, state and output.

Each state is read once and written once. B rows, C channels, K key heads, V value heads, G = V / K, k key dim,
v value dim, w conv width.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.delta_gates import decay_and_beta, silu_rounded

BLOCK_V = 64  # with 2 warps 561 us for 512 rows of 32 heads of 128 on an H200, with 4 warps 589 us


@triton.jit
def _convolve(
    x_ptr, tail_ptr, weight_ptr, channel, known, CHANNELS: tl.constexpr, WIDTH: tl.constexpr
):
    """Return the convolution of some channels after SiLU, float32, and move their tail on by the token."""
    x = tl.load(x_ptr + channel)
    weight_at = weight_ptr + channel * WIDTH
    sums = x.to(tl.float32) * tl.load(weight_at + WIDTH - 1).to(tl.float32)
    has_tail = known & (channel >= 0)
    tail_at = tail_ptr + channel
    second, third = x, x
    if WIDTH > 1:
        first = tl.load(tail_at, mask=has_tail, other=0.0)
        sums += first.to(tl.float32) * tl.load(weight_at).to(tl.float32)
    if WIDTH > 2:
        second = tl.load(tail_at + CHANNELS, mask=has_tail, other=0.0)
        sums += second.to(tl.float32) * tl.load(weight_at + 1).to(tl.float32)
    if WIDTH > 3:
        third = tl.load(tail_at + 2 * CHANNELS, mask=has_tail, other=0.0)
        sums += third.to(tl.float32) * tl.load(weight_at + 2).to(tl.float32)
    # Several threads may hold a channel: all must have read the tail before one writes it.
    tl.debug_barrier()
    if WIDTH > 1:
        tl.store(tail_at, second)
    if WIDTH > 2:
        tl.store(tail_at + CHANNELS, third)
    if WIDTH > 3:
        tl.store(tail_at + 2 * CHANNELS, x)
    return silu_rounded(sums, x_ptr.dtype.element_ty)


@triton.jit
def _gates(a_ptr, b_ptr, neg_exp_a_ptr, dt_bias_ptr, head):
    a, b = tl.load(a_ptr + head).to(tl.float32), tl.load(b_ptr + head).to(tl.float32)
    neg_exp_a, dt_bias = tl.load(neg_exp_a_ptr + head), tl.load(dt_bias_ptr + head)
    g, beta = decay_and_beta(a, b, neg_exp_a, dt_bias)
    return tl.exp(g), beta


@triton.jit
def _store_zeros(out_ptr, count, BLOCK: tl.constexpr):
    for part in range(count):
        zeros = tl.zeros([BLOCK], tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + part * BLOCK + tl.arange(0, BLOCK), zeros)


@triton.jit(do_not_specialize=["slots_ptr", "a_ptr", "b_ptr"])
def _advance(
    mixed_ptr,
    mixed_row,
    a_ptr,
    a_row,
    b_ptr,
    b_row,
    weight_ptr,
    neg_exp_a_ptr,
    dt_bias_ptr,
    slots_ptr,
    conv_ptr,
    state_ptr,
    out_ptr,
    scale,
    eps,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take one key head of one row with its GROUP value heads, and their channels, which no other program has."""
    key_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_size: tl.constexpr = KEY_HEADS * KEY_DIM
    value_heads: tl.constexpr = KEY_HEADS * GROUP
    channels: tl.constexpr = 2 * key_size + value_heads * VALUE_DIM
    signed = tl.load(slots_ptr + row)
    slot, known = tl.abs(signed), signed > 0
    if signed == 0:
        out_at = out_ptr + (row * KEY_HEADS + key_head) * (GROUP * VALUE_DIM)
        _store_zeros(out_at, GROUP * VALUE_DIM // BLOCK, BLOCK)
    else:
        x_ptr, tail_ptr = mixed_ptr + row * mixed_row, conv_ptr + slot * ((WIDTH - 1) * channels)
        a_at, b_at, key = a_ptr + row * a_row, b_ptr + row * b_row, tl.arange(0, KEY_DIM)
        at = key_head * KEY_DIM + key
        q = _convolve(x_ptr, tail_ptr, weight_ptr, at, known, channels, WIDTH)
        k = _convolve(x_ptr, tail_ptr, weight_ptr, key_size + at, known, channels, WIDTH)
        q = q * (tl.rsqrt(tl.sum(q * q) + eps) * scale)
        k = k * tl.rsqrt(tl.sum(k * k) + eps)
        product = tl.sum(q * k)
        for part in range(GROUP * VALUE_DIM // BLOCK):
            head = key_head * GROUP + part // (VALUE_DIM // BLOCK)
            value = (part % (VALUE_DIM // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
            decay, beta = _gates(a_at, b_at, neg_exp_a_ptr, dt_bias_ptr, head)
            channel = 2 * key_size + head * VALUE_DIM + value
            v = _convolve(x_ptr, tail_ptr, weight_ptr, channel, known, channels, WIDTH)
            state_at = state_ptr + (slot * value_heads + head) * (KEY_DIM * VALUE_DIM)
            state_at = state_at + key[:, None] * VALUE_DIM + value[None, :]
            state = tl.load(state_at, mask=known & (key[:, None] >= 0), other=0.0).to(tl.float32)
            # S^T q of the new state follows from the old one, so one pass suffices.
            read_k = tl.sum(state * k[:, None], 0)
            read_q = tl.sum(state * q[:, None], 0)
            delta = beta * (v - decay * read_k)
            state = decay * state + k[:, None] * delta[None, :]
            tl.store(state_at, state.to(state_ptr.dtype.element_ty))
            out = decay * read_q + product * delta
            out_at = out_ptr + (row * value_heads + head) * VALUE_DIM + value
            tl.store(out_at, out.to(out_ptr.dtype.element_ty))


def advance_decodes(
    mixed_BC: torch.Tensor,
    a_BV: torch.Tensor,
    b_BV: torch.Tensor,
    conv_weight_Cw: torch.Tensor,
    neg_exp_a_V: torch.Tensor,
    dt_bias_V: torch.Tensor,
    slots: torch.Tensor,
    conv: torch.Tensor,
    state: torch.Tensor,
    out_BVv: torch.Tensor,
    *,
    num_key_heads: int,
    eps: float,
) -> None:
    """Advance each row's slot by its token and write its output. See `LinearAttention` for the arithmetic.

    slots       int64 [B]: a slot with a state, or minus a slot without one, or 0 for rows of padding, which get zeros
    conv, state the pools [slots, w-1, C] and [slots, V, k, v]
    out         contiguous
    """
    num_rows, width = mixed_BC.shape[0], conv_weight_Cw.shape[1]
    _, num_heads, key_dim, value_dim = state.shape
    assert width <= 4 and mixed_BC.stride(1) == a_BV.stride(1) == b_BV.stride(1) == 1
    assert conv_weight_Cw.is_contiguous() and out_BVv.is_contiguous() and state.is_contiguous()
    if not num_rows:
        return
    _advance[(num_key_heads, num_rows)](
        mixed_BC,
        mixed_BC.stride(0),
        a_BV,
        a_BV.stride(0),
        b_BV,
        b_BV.stride(0),
        conv_weight_Cw,
        neg_exp_a_V,
        dt_bias_V,
        slots,
        conv,
        state,
        out_BVv,
        key_dim**-0.5,
        eps,
        KEY_HEADS=num_key_heads,
        GROUP=num_heads // num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=width,
        BLOCK=min(BLOCK_V, value_dim),
        num_warps=2,
    )
