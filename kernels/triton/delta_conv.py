"""Triton kernels for the convolution of prompts before gated delta nets: q, k and v of all tokens, and the new tails.

T tokens, N chunks, C channels, K key heads, V value heads, k key dim, v value dim, w conv width, n prompts.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.delta_gates import silu_rounded

CHUNK = 64
TAIL_BLOCK = 1024


@triton.jit
def _head(
    x_ptr,
    x_row,
    tail_ptr,
    weight_ptr,
    place,
    start,
    end,
    known,
    column,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the convolution of some channels of a chunk's rows after SiLU, float32; rows from `end` on are any.

    start, end    the rows of the prompt, counted from the chunk's first row, which x_ptr points to
    """
    sums = tl.zeros([place.shape[0], column.shape[1]], tl.float32)
    for tap in tl.static_range(WIDTH):
        source = place + (tap - WIDTH + 1)
        inside = (source >= start) & (source < end)
        x_at = x_ptr + source * x_row + column
        x = tl.load(x_at, mask=inside & (column >= 0), other=0.0).to(tl.float32)
        sums += x * tl.load(weight_ptr + column * WIDTH + tap).to(tl.float32)
    if known & (start == 0):
        for tap in tl.static_range(WIDTH - 1):
            before = place + tap < WIDTH - 1
            tail_at = tail_ptr + (place + tap) * CHANNELS + column
            x = tl.load(tail_at, mask=before & (column >= 0), other=0.0).to(tl.float32)
            sums += x * tl.load(weight_ptr + column * WIDTH + tap).to(tl.float32)
    return silu_rounded(sums, x_ptr.dtype.element_ty)


@triton.jit(
    do_not_specialize=["chunks_ptr", "prompts_ptr", "slots_ptr", "num_chunks", "num_prompts"]
)
def _convolve(
    mixed_ptr,
    mixed_row,
    weight_ptr,
    chunks_ptr,
    num_chunks,
    prompts_ptr,
    num_prompts,
    slots_ptr,
    conv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    scale,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Take one head of q, k or v of one chunk."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    key_size: tl.constexpr = KEY_HEADS * KEY_DIM
    value_size: tl.constexpr = VALUE_HEADS * VALUE_DIM
    channels: tl.constexpr = 2 * key_size + value_size
    prompt = tl.load(chunks_ptr + chunk)
    first, place = tl.load(chunks_ptr + num_chunks + chunk), tl.arange(0, ROWS)[:, None]
    start = tl.load(prompts_ptr + prompt) - first
    end = tl.load(prompts_ptr + num_prompts + prompt) - first
    if end <= 0:
        return
    first, real = first.to(tl.int64), place < end
    x_ptr = mixed_ptr + first * mixed_row
    q_ptr, k_ptr = q_ptr + first * key_size, k_ptr + first * key_size
    v_ptr = v_ptr + first * value_size
    signed = tl.load(slots_ptr + prompt)
    known, tail_ptr = signed > 0, conv_ptr + tl.abs(signed) * ((WIDTH - 1) * channels)
    if head < 2 * KEY_HEADS:
        column = head * KEY_DIM + tl.arange(0, KEY_DIM)[None, :]
        x = _head(
            *(x_ptr, mixed_row, tail_ptr, weight_ptr, place, start, end, known),
            *(column, channels, WIDTH),
        )
        x = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + eps)
        if head < KEY_HEADS:
            q_at = q_ptr + place * key_size + column
            tl.store(q_at, (x * scale).to(q_ptr.dtype.element_ty), mask=real & (column >= 0))
        else:
            k_at = k_ptr + place * key_size + column - key_size
            tl.store(k_at, x.to(k_ptr.dtype.element_ty), mask=real & (column >= 0))
    else:
        value = (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)[None, :]
        v = _head(
            *(x_ptr, mixed_row, tail_ptr, weight_ptr, place, start, end, known),
            *(2 * key_size + value, channels, WIDTH),
        )
        v_at = v_ptr + place * value_size + value
        tl.store(v_at, v.to(v_ptr.dtype.element_ty), mask=real & (value >= 0))


@triton.jit(do_not_specialize=["prompts_ptr", "slots_ptr", "num_prompts"])
def _store_tails(
    mixed_ptr,
    mixed_row,
    prompts_ptr,
    num_prompts,
    slots_ptr,
    conv_ptr,
    CHANNELS: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take BLOCK channels of one prompt."""
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    prompt = tl.program_id(1)
    start = tl.load(prompts_ptr + prompt).to(tl.int64)
    end = tl.load(prompts_ptr + num_prompts + prompt).to(tl.int64)
    signed = tl.load(slots_ptr + prompt)
    tail_ptr = conv_ptr + tl.abs(signed) * (TAIL * CHANNELS)
    place = tl.arange(0, ROWS)[:, None]
    source = end - TAIL + place
    exists = (place < TAIL) & (column < CHANNELS)
    x = tl.load(mixed_ptr + source * mixed_row + column, mask=exists & (source >= start), other=0.0)
    old_at = tail_ptr + (source - start + TAIL) * CHANNELS + column
    x += tl.load(old_at, mask=exists & (source < start) & (signed > 0), other=0.0)
    # A short prompt keeps rows of its old tail: all threads must have read them before one writes.
    tl.debug_barrier()
    tl.store(tail_ptr + place * CHANNELS + column, x, mask=exists & (signed != 0))


def convolve_prompts(
    mixed_TC: torch.Tensor,
    conv_weight_Cw: torch.Tensor,
    chunks_2N: torch.Tensor,
    prompts_2n: torch.Tensor,
    slots: torch.Tensor,
    conv: torch.Tensor,
    heads: tuple[int, int, int, int],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [T, K, k] with norms of 1 / sqrt(k), k [T, K, k] with norms of 1 and v [T, V, v]; update the tails.

    chunks   int32: the prompt and the first row of each chunk of up to 64 rows; a row behind the prompt: no chunk
    prompts  int32: the first row of each prompt, and the row behind its last
    slots    int64 [n]: a slot with a state, or minus a slot without one, or 0 for none
    conv     the pool [slots, w-1, C]
    heads    K, V, k, v
    """
    num_tokens, channels = mixed_TC.shape
    num_key_heads, num_heads, key_dim, value_dim = heads
    width = conv_weight_Cw.shape[1]
    assert mixed_TC.stride(1) == 1 and conv_weight_Cw.is_contiguous()
    q, k = (mixed_TC.new_empty(num_tokens, num_key_heads, key_dim) for _ in "qk")
    v = mixed_TC.new_empty(num_tokens, num_heads, value_dim)
    _convolve[(2 * num_key_heads + num_heads, chunks_2N.shape[1])](
        *(mixed_TC, mixed_TC.stride(0), conv_weight_Cw, chunks_2N, chunks_2N.shape[1]),
        *(prompts_2n, prompts_2n.shape[1], slots, conv, q, k, v, key_dim**-0.5, eps),
        KEY_HEADS=num_key_heads,
        VALUE_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=width,
        ROWS=CHUNK,
        num_warps=8,
    )
    if width > 1:
        _store_tails[(triton.cdiv(channels, TAIL_BLOCK), prompts_2n.shape[1])](
            mixed_TC,
            mixed_TC.stride(0),
            prompts_2n,
            prompts_2n.shape[1],
            slots,
            conv,
            CHANNELS=channels,
            TAIL=width - 1,
            ROWS=triton.next_power_of_2(width - 1),
            BLOCK=TAIL_BLOCK,
        )
    return q, k, v
