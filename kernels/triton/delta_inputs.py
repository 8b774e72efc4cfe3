"""Triton kernel that reads the rows of decodes of gated delta nets: convolution, norms and gates. It writes no state.

Of each sequence it reads the drafts that the step before accepted, from the slot, and then the rows of this step. The
first of these moves the tail of the convolution on; the inputs of the others, which are drafts, take the place of the
old drafts.

B sequences, R rows, C channels, K key heads, V value heads, k key dim, v value dim, w conv width, D drafts of a slot,
X = C + 2V: q, k and v, then the decay and beta of each value head.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.delta_gates import decay_and_beta, silu_rounded
from kernels.triton.delta_table import DecodeTable
from kernels.triton.pdl import begin, dependent_launch


@triton.jit
def rows_of(starts_ptr, seq, SEVERAL: tl.constexpr):
    """Return the first row of a sequence, the row behind its last, and its rows in earlier ubatches."""
    if SEVERAL:
        start, end = tl.load(starts_ptr + 1 + seq), tl.load(starts_ptr + 2 + seq)
        before = tl.where(seq == 0, tl.load(starts_ptr), 0)
    else:
        start, end, before = seq, seq + 1, 0
    return start.to(tl.int64), end.to(tl.int64), before


@triton.jit
def num_kept(accepted_ptr, signed, before, DRAFTS: tl.constexpr):
    """Return the drafts of the slot that come before the rows of its sequence."""
    if DRAFTS:
        accepted = tl.load(accepted_ptr + tl.abs(signed)).to(tl.int32)
        kept = tl.where(before > 0, before - 1, tl.where(signed > 0, accepted, 0))
    else:
        kept = 0
    return kept


@triton.jit
def _weights(weight_ptr, channel, WIDTH: tl.constexpr):
    """Return the weights of the token itself and of 1, 2 and 3 tokens before it; those beyond the width are any."""
    at = weight_ptr + channel * WIDTH + (WIDTH - 1)
    own = tl.load(at).to(tl.float32)
    first, second, third = own, own, own
    if WIDTH > 1:
        first = tl.load(at - 1).to(tl.float32)
    if WIDTH > 2:
        second = tl.load(at - 2).to(tl.float32)
    if WIDTH > 3:
        third = tl.load(at - 3).to(tl.float32)
    return own, first, second, third


@triton.jit
def _tail(tail_at, x, known, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the rows 1, 2 and 3 before x; those beyond the width are any."""
    first, second, third = x, x, x
    if WIDTH > 1:
        first = tl.load(tail_at + (WIDTH - 2) * CHANNELS, mask=known, other=0.0)
    if WIDTH > 2:
        second = tl.load(tail_at + (WIDTH - 3) * CHANNELS, mask=known, other=0.0)
    if WIDTH > 3:
        third = tl.load(tail_at + (WIDTH - 4) * CHANNELS, mask=known, other=0.0)
    return first, second, third


@triton.jit
def _store_tail(tail_at, x, first, second, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Move the tail on by x."""
    if WIDTH > 1:
        tl.store(tail_at + (WIDTH - 2) * CHANNELS, x)
    if WIDTH > 2:
        tl.store(tail_at + (WIDTH - 3) * CHANNELS, first)
    if WIDTH > 3:
        tl.store(tail_at + (WIDTH - 4) * CHANNELS, second)


@triton.jit
def _store(
    x_at,
    x,
    first,
    second,
    third,
    own,
    w1,
    w2,
    w3,
    factor,
    eps,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
):
    """Write the convolution of a row after SiLU, with a norm of `factor` if NORM is true."""
    sums = x.to(tl.float32) * own
    if WIDTH > 1:
        sums += first.to(tl.float32) * w1
    if WIDTH > 2:
        sums += second.to(tl.float32) * w2
    if WIDTH > 3:
        sums += third.to(tl.float32) * w3
    read = silu_rounded(sums, x.dtype)
    if NORM:
        read *= tl.rsqrt(tl.sum(read * read) + eps) * factor
    tl.store(x_at, read)


@triton.jit
def _read_channels(
    mixed_ptr,
    mixed_row,
    weight_ptr,
    tail_ptr,
    drafts_ptr,
    x_ptr,
    channel,
    factor,
    eps,
    known,
    kept,
    num_rows,
    before,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    SEVERAL: tl.constexpr,
    NORM: tl.constexpr,
):
    """Read the channels of one head of q and k, which have norms, or of v."""
    mixed_at, tail_at = mixed_ptr + channel, tail_ptr + channel
    drafts_at, x_at = drafts_ptr + channel, x_ptr + channel
    own, w1, w2, w3 = _weights(weight_ptr, channel, WIDTH)
    x = tl.load(mixed_at)
    first, second, third = _tail(tail_at, x, known & (channel >= 0), CHANNELS, WIDTH)
    if DRAFTS:
        for place in range(kept):
            old = tl.load(drafts_at + place * SIZE)
            _store(x_at, old, first, second, third, own, w1, w2, w3, factor, eps, WIDTH, NORM)
            third = second
            second = first
            first = old
            x_at += SIZE
    # Several threads may hold a channel: all must have read the slot before one writes it.
    tl.debug_barrier()
    _store(x_at, x, first, second, third, own, w1, w2, w3, factor, eps, WIDTH, NORM)
    if before == 0:
        _store_tail(tail_at, x, first, second, CHANNELS, WIDTH)
    elif DRAFTS:
        tl.store(drafts_at + (before - 1) * SIZE, x)
    if SEVERAL:
        for row in range(1, num_rows):
            third = second
            second = first
            first = x
            x = tl.load(mixed_at + row * mixed_row)
            x_at += SIZE
            _store(x_at, x, first, second, third, own, w1, w2, w3, factor, eps, WIDTH, NORM)
            tl.store(drafts_at + (before + row - 1) * SIZE, x)


@triton.jit
def _read_gates(
    a_ptr,
    a_row,
    b_ptr,
    b_row,
    neg_exp_a_ptr,
    dt_bias_ptr,
    drafts_ptr,
    x_ptr,
    kept,
    num_rows,
    before,
    VALUE_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Read the gates of all value heads; drafts_ptr and x_ptr point to the first gate of a row."""
    head = tl.arange(0, triton.next_power_of_2(VALUE_HEADS))
    real = head < VALUE_HEADS
    neg_exp_a = tl.load(neg_exp_a_ptr + head, mask=real, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + head, mask=real, other=0.0)
    if DRAFTS:
        for place in range(kept):
            at = drafts_ptr + place * SIZE + head
            a = tl.load(at, mask=real, other=0.0).to(tl.float32)
            b = tl.load(at + VALUE_HEADS, mask=real, other=0.0).to(tl.float32)
            g, beta = decay_and_beta(a, b, neg_exp_a, dt_bias)
            tl.store(x_ptr + head, tl.exp(g), mask=real)
            tl.store(x_ptr + VALUE_HEADS + head, beta, mask=real)
            x_ptr += SIZE
    tl.debug_barrier()
    for row in range(num_rows):
        a = tl.load(a_ptr + row * a_row + head, mask=real, other=0.0)
        b = tl.load(b_ptr + row * b_row + head, mask=real, other=0.0)
        g, beta = decay_and_beta(a.to(tl.float32), b.to(tl.float32), neg_exp_a, dt_bias)
        tl.store(x_ptr + head, tl.exp(g), mask=real)
        tl.store(x_ptr + VALUE_HEADS + head, beta, mask=real)
        if DRAFTS:
            at = drafts_ptr + (before + row - 1) * SIZE + head
            tl.store(at, a, mask=real & (before + row > 0))
            tl.store(at + VALUE_HEADS, b, mask=real & (before + row > 0))
        x_ptr += SIZE


@triton.jit(do_not_specialize=["slots_ptr", "starts_ptr", "a_ptr", "b_ptr"])
def _convolve(
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
    starts_ptr,
    conv_ptr,
    drafts_ptr,
    accepted_ptr,
    x_ptr,
    scale,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    SEVERAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take one head of q, k or v of one sequence, or all its gates; no other program has them."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_size: tl.constexpr = KEY_HEADS * KEY_DIM
    channels: tl.constexpr = 2 * key_size + VALUE_HEADS * VALUE_DIM
    size: tl.constexpr = channels + 2 * VALUE_HEADS
    begin(PDL)
    signed = tl.load(slots_ptr + seq)
    if signed != 0:
        start, end, before = rows_of(starts_ptr, seq, SEVERAL)
        kept, rows = num_kept(accepted_ptr, signed, before, DRAFTS), (end - start).to(tl.int32)
        tail_ptr = conv_ptr + tl.abs(signed) * ((WIDTH - 1) * channels)
        drafts_ptr += tl.abs(signed) * (DRAFTS * size)
        x_ptr += (start + seq * DRAFTS) * size
        mixed_ptr += start * mixed_row
        if head < 2 * KEY_HEADS:
            at = head * KEY_DIM + tl.arange(0, KEY_DIM)
            factor = tl.where(head < KEY_HEADS, scale, 1.0)
            _read_channels(
                *(mixed_ptr, mixed_row, weight_ptr, tail_ptr, drafts_ptr, x_ptr, at, factor, eps),
                *(signed > 0, kept, rows, before, channels, size, WIDTH, DRAFTS, SEVERAL, True),
            )
        elif head < 2 * KEY_HEADS + VALUE_HEADS:
            v_at = 2 * key_size + (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)
            _read_channels(
                *(mixed_ptr, mixed_row, weight_ptr, tail_ptr, drafts_ptr, x_ptr, v_at, 1.0, eps),
                *(signed > 0, kept, rows, before, channels, size, WIDTH, DRAFTS, SEVERAL, False),
            )
        else:
            _read_gates(
                *(a_ptr + start * a_row, a_row, b_ptr + start * b_row, b_row, neg_exp_a_ptr),
                *(dt_bias_ptr, drafts_ptr + channels, x_ptr + channels, kept, rows, before),
                *(VALUE_HEADS, size, DRAFTS),
            )


def read_decodes(
    mixed_TC: torch.Tensor,
    a_TV: torch.Tensor,
    b_TV: torch.Tensor,
    conv_weight_Cw: torch.Tensor,
    neg_exp_a_V: torch.Tensor,
    dt_bias_V: torch.Tensor,
    table: DecodeTable,
    pools: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: tuple[int, int, int, int],
    eps: float,
) -> torch.Tensor:
    """Return what the rows of decodes read, float32 [R, X], q with norms of 1 / sqrt(k) and k of 1; write the slots.

    The accepted drafts and the rows of sequence s begin at the row starts[s] + s * D.

    pools   conv [slots, w-1, C], drafts [slots, D, X] and accepted [slots]
    heads   K, V, k, v
    """
    conv, drafts, accepted = pools
    num_seqs, width, num_drafts = len(table.slots), conv_weight_Cw.shape[1], drafts.shape[1]
    num_key_heads, num_heads, key_dim, value_dim = heads
    assert a_TV.stride(1) == b_TV.stride(1) == mixed_TC.stride(1) == 1
    assert width <= 4 and conv_weight_Cw.is_contiguous() and drafts.is_contiguous()
    shape = table.most_rows + num_seqs * num_drafts, mixed_TC.shape[1] + 2 * num_heads
    x_RX = torch.empty(shape, dtype=torch.float32, device=mixed_TC.device)
    _convolve[(2 * num_key_heads + num_heads + 1, num_seqs)](
        mixed_TC,
        mixed_TC.stride(0),
        a_TV,
        a_TV.stride(0),
        b_TV,
        b_TV.stride(0),
        *(conv_weight_Cw, neg_exp_a_V, dt_bias_V, table.slots, table.starts_or_any),
        *(conv, drafts, accepted, x_RX, key_dim**-0.5, eps),
        KEY_HEADS=num_key_heads,
        VALUE_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=width,
        DRAFTS=num_drafts,
        SEVERAL=table.starts is not None,
        **dependent_launch(table.most_rows),
        num_warps=1,
    )
    return x_RX
