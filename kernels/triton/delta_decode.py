"""Triton kernels for a decode step of gated delta nets: convolution and norms, then gates, state and output.

The second kernel reads each state once and writes it once, which takes most of the time. Each of its programs holds a
part of one head's state, and loads it while the first kernel runs. B rows, C channels, K key heads, V value heads,
G = V / K, k key dim, v value dim, w conv width.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.delta_gates import decay_and_beta, silu_rounded
from kernels.triton.pdl import begin, dependent_launch

BLOCK_V = 64


@triton.jit
def _convolve_channels(
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


@triton.jit(do_not_specialize=["slots_ptr"])
def _convolve(
    mixed_ptr,
    mixed_row,
    weight_ptr,
    slots_ptr,
    conv_ptr,
    x_ptr,
    scale,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take one head of q, k or v of one row; no other program has its channels."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_size: tl.constexpr = KEY_HEADS * KEY_DIM
    channels: tl.constexpr = 2 * key_size + VALUE_HEADS * VALUE_DIM
    begin(PDL)
    signed = tl.load(slots_ptr + row)
    if signed != 0:
        source_ptr, out_ptr = mixed_ptr + row * mixed_row, x_ptr + row * channels
        tail_ptr, known = conv_ptr + tl.abs(signed) * ((WIDTH - 1) * channels), signed > 0
        if head < 2 * KEY_HEADS:
            at = head * KEY_DIM + tl.arange(0, KEY_DIM)
            x = _convolve_channels(source_ptr, tail_ptr, weight_ptr, at, known, channels, WIDTH)
            factor = tl.where(head < KEY_HEADS, scale, 1.0)
            tl.store(out_ptr + at, x * (tl.rsqrt(tl.sum(x * x) + eps) * factor))
        else:
            value_at = 2 * key_size + (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)
            v = _convolve_channels(
                source_ptr, tail_ptr, weight_ptr, value_at, known, channels, WIDTH
            )
            tl.store(out_ptr + value_at, v)


@triton.jit(do_not_specialize=["slots_ptr", "a_ptr", "b_ptr"])
def _advance(
    x_ptr,
    a_ptr,
    a_row,
    b_ptr,
    b_row,
    neg_exp_a_ptr,
    dt_bias_ptr,
    slots_ptr,
    state_ptr,
    out_ptr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take BLOCK columns of one value head of one row."""
    parts: tl.constexpr = VALUE_DIM // BLOCK
    value_heads: tl.constexpr = KEY_HEADS * GROUP
    channels: tl.constexpr = (2 * KEY_DIM + GROUP * VALUE_DIM) * KEY_HEADS
    head, row = tl.program_id(0) // parts, tl.program_id(1).to(tl.int64)
    key, value = tl.arange(0, KEY_DIM), tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    out_at = out_ptr + (row * value_heads + head) * VALUE_DIM + value
    signed = tl.load(slots_ptr + row)
    state_at = state_ptr + (tl.abs(signed) * value_heads + head) * (KEY_DIM * VALUE_DIM)
    state_at = state_at + key[:, None] * VALUE_DIM + value[None, :]
    # Before `begin`, because no kernel of this step has written states of this layer's decodes.
    old = tl.load(state_at, mask=(signed > 0) & (key[:, None] >= 0), other=0.0)
    begin(PDL)
    if signed == 0:
        tl.store(out_at, tl.zeros([BLOCK], tl.float32).to(out_ptr.dtype.element_ty))
    else:
        query_at = x_ptr + row * channels + head // GROUP * KEY_DIM + key
        q, k = tl.load(query_at), tl.load(query_at + KEY_HEADS * KEY_DIM)
        values_at = x_ptr + row * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        v = tl.load(values_at + value)
        decay, beta = _gates(
            a_ptr + row * a_row, b_ptr + row * b_row, neg_exp_a_ptr, dt_bias_ptr, head
        )
        state = old.to(tl.float32)
        # S^T q of the new state follows from the old one, so one pass suffices.
        read_k = tl.sum(state * k[:, None], 0)
        read_q = tl.sum(state * q[:, None], 0)
        delta = beta * (v - decay * read_k)
        state = decay * state + k[:, None] * delta[None, :]
        tl.store(state_at, state.to(state_ptr.dtype.element_ty))
        out = decay * read_q + tl.sum(q * k) * delta
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
    assert a_BV.stride(1) == b_BV.stride(1) == 1
    assert out_BVv.is_contiguous() and state.is_contiguous()
    num_rows, (_, num_heads, key_dim, value_dim) = len(mixed_BC), state.shape
    if not num_rows:
        return
    heads = (num_key_heads, num_heads, key_dim, value_dim)
    x_BC = _convolved(mixed_BC, conv_weight_Cw, slots, conv, heads, eps)
    block = min(BLOCK_V, value_dim)
    _advance[(num_heads * (value_dim // block), num_rows)](
        x_BC,
        a_BV,
        a_BV.stride(0),
        b_BV,
        b_BV.stride(0),
        neg_exp_a_V,
        dt_bias_V,
        slots,
        state,
        out_BVv,
        KEY_HEADS=num_key_heads,
        GROUP=num_heads // num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK=block,
        **dependent_launch(num_rows),
        num_warps=2,
    )


def _convolved(
    mixed_BC: torch.Tensor,
    conv_weight_Cw: torch.Tensor,
    slots: torch.Tensor,
    conv: torch.Tensor,
    heads: tuple[int, int, int, int],
    eps: float,
) -> torch.Tensor:
    """Return q, k and v, float32 [B, C], q with norms of 1 / sqrt(k) and k of 1; move the tails on by the token.

    heads   K, V, k, v
    """
    (num_rows, channels), width = mixed_BC.shape, conv_weight_Cw.shape[1]
    num_key_heads, num_heads, key_dim, value_dim = heads
    assert width <= 4 and mixed_BC.stride(1) == 1 and conv_weight_Cw.is_contiguous()
    x_BC = torch.empty(num_rows, channels, dtype=torch.float32, device=mixed_BC.device)
    _convolve[(2 * num_key_heads + num_heads, num_rows)](
        mixed_BC,
        mixed_BC.stride(0),
        conv_weight_Cw,
        slots,
        conv,
        x_BC,
        key_dim**-0.5,
        eps,
        KEY_HEADS=num_key_heads,
        VALUE_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=width,
        **dependent_launch(num_rows),
        num_warps=1,
    )
    return x_BC
