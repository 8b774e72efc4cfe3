"""Attention over pages with sinks and sliding windows for prompts.

A program computes the query rows of one tile: some new tokens of a sequence, with the G query heads that share a KV
head. It reads no key before the window of its first token.

T tokens, H query heads, h KV heads, G = H / h, d head dim, B sequences, N tiles.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.triton.fp8_heads import power_of_two

LN_2 = tl.constexpr(0.6931471805599453)
ROWS = 16  # fewest rows of a product of tensor cores
KEYS = 64  # keys at a time
# In place of a tile's sequence: no tile, and a tile of rows behind the last sequence.
NOTHING, PADDING = tl.constexpr(-1), tl.constexpr(-2)


@triton.jit
def _places(table_ptr, key, seen, value, head, BLOCK_SIZE, HEADS, HEAD_DIM):
    """Return where the values and the exponent of each key of a KV head lie; `key` counts the sequence's tokens."""
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + key % BLOCK_SIZE
    exponent = (block * HEADS + head) * BLOCK_SIZE + key % BLOCK_SIZE
    return (slot * HEADS + head)[:, None] * HEAD_DIM + value[None, :], exponent


@triton.jit
def _store_zeros(at, mask):
    tl.store(at, tl.zeros(mask.shape, at.dtype.element_ty), mask=mask)


@triton.jit
def _span(starts_ptr, lens_ptr, seq):
    """Return the first row of a sequence, its new tokens and its context."""
    start = tl.load(starts_ptr + seq)
    num_new = tl.load(starts_ptr + seq + 1) - start
    return start, num_new, tl.load(lens_ptr + seq) - num_new


@triton.jit
def _sinks(sinks_ptr, query_head, used, SINKS: tl.constexpr):
    """Return the maximum and the sum of the softmax before the first key."""
    top = tl.full(used.shape, float("-inf"), tl.float32)
    total = tl.zeros(used.shape, tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + query_head, mask=used, other=0).to(tl.float32)
        total += 1
    return top, total


@triton.jit
def _half_rows(q, scale):
    """Return q in float16, its rows divided by powers of two, and these times `scale`; float32 stays."""
    half, factor = q, tl.full((q.shape[0],), 1.0, tl.float32)
    if q.dtype != tl.float32:
        wide = q.to(tl.float32)
        exponent = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        half = (wide * power_of_two(254 - exponent)[:, None]).to(tl.float16)
        factor = power_of_two(exponent)
    return half, factor * scale


@triton.jit
def _merge(top, total, out, scores, v, share, PRECISION: tl.constexpr):
    """Return the softmax so far merged with further scores; -inf: not attended to.

    share   part of a key's weight that counts to the sum, [keys] or 1
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights = tl.exp(scores - floor[:, None])
    decay = tl.exp(top - floor)
    out = tl.dot(weights.to(v.dtype), v, out * decay[:, None], input_precision=PRECISION)
    return new_top, total * decay + tl.sum(weights * share, 1), out


@triton.jit
def attend(
    q,
    k_ptr,
    v_ptr,
    k_exponents_ptr,
    v_exponents_ptr,
    table_ptr,
    top,
    total,
    begin,
    end,
    lowest,
    position,
    head,
    value,
    scale,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
):
    """Attend from the rows of q to keys `begin` to `end` - 1 from `lowest` on.

    Return maximum, sum and unscaled output of the softmax in float32; top and total are those of the sinks.
    FP8: K and V in e4m3 become float16 (float32 with q in float32) without their scales. The scale of a key multiplies
    its scores, that of a value its weight, and the maximum is that of both, so that no weight exceeds 1.
    """
    out = tl.zeros(q.shape, tl.float32)
    if FP8:
        q, scale = _half_rows(q, scale)
    for key_0 in range(begin, end, KEYS):
        key = key_0 + tl.arange(0, KEYS)
        seen = (key < end) & (key >= lowest)  # blocks before the first row's window may be freed
        at, exponent_at = _places(table_ptr, key, seen, value, head, BLOCK_SIZE, HEADS, HEAD_DIM)
        mask = seen[:, None] & (value < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        attends = seen[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            attends = attends & (key[None, :] > position[:, None] - WINDOW)
        if FP8:
            k_exponent = tl.load(k_exponents_ptr + exponent_at, mask=seen, other=127).to(tl.int32)
            v_exponent = tl.load(v_exponents_ptr + exponent_at, mask=seen, other=127).to(tl.int32)
            scores = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION)
            scores *= scale[:, None] * power_of_two(k_exponent)[None, :]
            scores += ((v_exponent - 127) * LN_2)[None, :]
            scores = tl.where(attends, scores, float("-inf"))
            share = power_of_two(254 - v_exponent)[None, :]
            top, total, out = _merge(top, total, out, scores, v.to(q.dtype), share, PRECISION)
        else:
            scores = tl.dot(q, k.T, input_precision=PRECISION) * scale
            scores = tl.where(attends, scores, float("-inf"))
            top, total, out = _merge(top, total, out, scores, v, 1.0, PRECISION)
    return top, total, out


@triton.jit(
    do_not_specialize=[
        *("q_row", "table_ptr", "table_row", "seq_ptr", "first_ptr", "starts_ptr", "lens_ptr"),
        *("sinks_ptr", "k_exponents_ptr", "v_exponents_ptr", "num_rows"),
    ]
)
def paged_attention_kernel(
    q_ptr,
    q_row,
    num_rows,
    k_ptr,
    v_ptr,
    k_exponents_ptr,
    v_exponents_ptr,
    out_ptr,
    table_ptr,
    table_row,
    seq_ptr,
    first_ptr,
    starts_ptr,
    lens_ptr,
    sinks_ptr,
    scale,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
):
    """One tile of up to TOKENS tokens, for one KV head. WINDOW 0: no window."""
    tile, head = tl.program_id(0), tl.program_id(1)
    seq, first = tl.load(seq_ptr + tile), tl.load(first_ptr + tile)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    query_head = head * GROUP + row % GROUP
    value = tl.arange(0, HEAD_DIM_2)
    head_at = query_head[:, None] * HEAD_DIM + value[None, :]
    if seq < 0:
        behind = (row < TOKENS * GROUP) & (token < num_rows) & (seq == PADDING)
        out_at = token.to(tl.int64)[:, None] * (HEADS * GROUP * HEAD_DIM) + head_at
        _store_zeros(out_ptr + out_at, behind[:, None] & (value < HEAD_DIM)[None, :])
        return
    start, num_new, context = _span(starts_ptr, lens_ptr, seq)
    used = (row < TOKENS * GROUP) & (token < num_new)
    mask = used[:, None] & (value < HEAD_DIM)[None, :]
    at = (start + token).to(tl.int64)[:, None]
    q = tl.load(q_ptr + at * q_row + head_at, mask=mask, other=0)
    top, total = _sinks(sinks_ptr, query_head, used, SINKS)
    lowest = tl.maximum(context + first + 1 - WINDOW, 0) if WINDOW else 0
    top, total, out = attend(
        *(q, k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr),
        *(table_ptr + seq.to(tl.int64) * table_row, top, total),
        *(lowest // KEYS * KEYS, tl.minimum(context + first + TOKENS, context + num_new), lowest),
        *(context + token, head, value, scale),
        *(WINDOW, BLOCK_SIZE, HEADS, HEAD_DIM, KEYS, PRECISION, FP8),
    )
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    out_at = at * (HEADS * GROUP * HEAD_DIM) + head_at
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


def tile_tokens(group_size: int) -> int:
    """Return the tokens of a tile for heads in groups of this size."""
    return max(1, 4 * ROWS // group_size)


def paged_attention(
    q_THd: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_THd: torch.Tensor,
    block_table: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
    exponents: Sequence[torch.Tensor] = (),
) -> None:
    """Write the attention of the tiles' rows to out_THd; K and V of the new tokens are in the cache already.

    q             rows of contiguous heads, any stride between rows; out is contiguous
    k, v cache    [num_blocks, block_size, h, d]
    block_table   int64 [B, max_blocks]; entries before the first window may be any
    tiles         int32 [N] each: the sequence of a tile, and the first of its up to `tile_tokens` new tokens; NOTHING;
                  PADDING and the first of up to `tile_tokens` rows, which become zero
    starts, lens  int32 [B + 1] first row of a sequence, and [B] its context and new tokens
    sinks         float32 [H]
    exponents     of caches in float8_e4m3fn: those of K and of V, uint8 [num_blocks, h, block_size]
    """
    num_heads, head_dim = q_THd.shape[1:]
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    tokens = tile_tokens(group)
    assert q_THd.stride()[1:] == (head_dim, 1) and out_THd.is_contiguous()
    seqs, firsts = tiles
    if not len(seqs):
        return
    paged_attention_kernel[(len(seqs), num_kv_heads)](
        *(q_THd, q_THd.stride(0), len(q_THd), k_cache, v_cache, *(exponents or (lens, lens))),
        *(out_THd, block_table, block_table.stride(0), seqs, firsts, starts, lens),
        *(starts if sinks_H is None else sinks_H, scale),
        WINDOW=window or 0,
        SINKS=sinks_H is not None,
        BLOCK_SIZE=block_size,
        HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_2=max(16, triton.next_power_of_2(head_dim)),
        TOKENS=tokens,
        ROWS=max(ROWS, triton.next_power_of_2(tokens * group)),
        KEYS=KEYS,
        PRECISION="ieee" if q_THd.dtype == torch.float32 else "tf32",
        FP8=bool(exponents),
        num_warps=4,
    )
