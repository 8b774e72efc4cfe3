"""Triton kernels that prepare the chunks of prompts of gated delta nets: convolution, norms, gates and inverses.

In a chunk of up to 64 tokens with keys k, values v, gates g and beta, let d be the running sum of g, and A the strictly
lower part of beta_i (k_i . k_j) exp(d_i - d_j). A state S before the chunk makes the tokens' new values
(I + A)^-1 beta (v - exp(d) k S): the WY form of Yang et al., "Gated Delta Networks". No part of it but S depends on
other chunks, so all chunks are prepared at once; `delta_scan` carries S on.

T tokens, N chunks, C channels, K key heads, V value heads, k key dim, v value dim, w conv width.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.delta_conv import convolve_rows, taps_of
from kernels.triton.delta_gates import CHUNKS_AT, SIZE, decay_and_beta, power_of_two, precision
from kernels.triton.delta_table import CHUNK, PromptTable

ROWS_AT_A_TIME = 32  # of a chunk, in the convolution


@dataclass(frozen=True, eq=False)
class Convolved:
    """Rows of prompts behind the convolution. Rows of decodes and chunks behind the last may hold anything.

    A chunk may be read whole: the 64 rows behind the last prompt's last chunk's first are written. q, k and v are
    finite, because the last chunk of a prompt also reads rows of later prompts, where hidden states may be NaN.

    q, k      [T+64, K, k]; norms of 1 / sqrt(k) and of 1
    v         [T+64, V, v]
    gates     float32 [N+1, V, 4, 64]: d / log(2), beta, exp(d), and exp(D - d) with D the last d of the chunk; places
              without a token have D, 0, exp(D) and 0
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: torch.Tensor


@dataclass(frozen=True, eq=False)
class Prepared(Convolved):
    """What the recurrence over chunks reads; inverse is finite too.

    inverse   [T+64, V, 64]: the rows of (I + A)^-1, each column times its beta
    scores    [T+64, V, 64]: (q_i . k_j) exp(d_i - d_j), zeros for j > i
    """

    inverse: torch.Tensor
    scores: torch.Tensor


@triton.jit
def _chunk(numbers_ptr, chunk, max_chunks, max_prompts):
    """Return a chunk's prompt and first row; from there the prompt's first row, the row behind its last, and the row
    behind the last that is written: behind the last prompt, places without a token too."""
    chunks_ptr = numbers_ptr + CHUNKS_AT
    prompts_ptr = chunks_ptr + 2 * max_chunks
    prompt, first = tl.load(chunks_ptr + chunk), tl.load(chunks_ptr + max_chunks + chunk)
    start = tl.load(prompts_ptr + prompt) - first
    end = tl.load(prompts_ptr + max_prompts + prompt) - first
    written = tl.where(prompt + 1 == tl.load(numbers_ptr + 1), SIZE, end)
    return prompt, first.to(tl.int64), start, end, written


@triton.jit
def _finite(x):
    """Return x with zeros for NaN and infinities. The hidden states of a row with NaN stay NaN without them."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _store_gates(
    gates_ptr,
    end,
    a_ptr,
    a_row,
    b_ptr,
    b_row,
    neg_exp_a_ptr,
    dt_bias_ptr,
    HEADS: tl.constexpr,
):
    """Write the gates of all heads of a chunk; pointers point to its first row."""
    head, rows = tl.arange(0, triton.next_power_of_2(HEADS)), tl.arange(0, SIZE)[:, None]
    exists = head < HEADS
    mask, stored = (rows < end) & exists[None, :], exists[None, :] & (rows >= 0)
    a = tl.load(a_ptr + rows * a_row + head[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + rows * b_row + head[None, :], mask=mask, other=0.0).to(tl.float32)
    neg_exp_a = tl.load(neg_exp_a_ptr + head, mask=exists, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + head, mask=exists, other=0.0)
    g, beta = decay_and_beta(a, b, neg_exp_a[None, :], dt_bias[None, :])
    g = tl.where(mask, g * 1.4426950408889634, 0.0)
    decay, total = tl.cumsum(g, 0), tl.sum(g, 0)
    left = tl.where(mask, power_of_two(total[None, :] - decay), 0.0)
    at = gates_ptr + head[None, :] * (4 * SIZE) + rows
    tl.store(at, decay, mask=stored)
    tl.store(at + SIZE, tl.where(mask, beta, 0.0), mask=stored)
    tl.store(at + 2 * SIZE, power_of_two(decay), mask=stored)
    tl.store(at + 3 * SIZE, left, mask=stored)


@triton.jit
def _convolve_head(
    source,
    weight_ptr,
    out_ptr,
    written,
    column,
    channel,
    factor,
    eps,
    NORM: tl.constexpr,
    OUT_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write one head of a chunk, with NORM its norm times `factor`; pointers point to the chunk's first row.

    column, channel   of the head in a row of out_ptr, and in a row that is convolved
    """
    taps = taps_of(weight_ptr, channel, WIDTH)
    for begin in tl.range(0, SIZE, ROWS):
        place = begin + 4 * tl.arange(0, ROWS // 4)
        rows = convolve_rows(*source, taps, place, channel, CHANNELS, WIDTH)
        for i in tl.static_range(4):
            x = rows[i]
            if NORM:
                x = x * (tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + eps) * factor)
            mask = (place + i < written)[:, None] & (column >= 0)[None, :]
            at = (place + i)[:, None] * OUT_ROW + column[None, :]
            tl.store(out_ptr + at, _finite(x).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["numbers_ptr", "max_chunks", "max_prompts", "slots_ptr", "a_ptr", "b_ptr"]
)
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
    numbers_ptr,
    max_chunks,
    max_prompts,
    slots_ptr,
    conv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    gates_ptr,
    scale,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Take one head of q, k or v, or the gates of all heads, of some chunks."""
    head = tl.program_id(0)
    key_size: tl.constexpr = KEY_HEADS * KEY_DIM
    value_size: tl.constexpr = HEADS * VALUE_DIM
    channels: tl.constexpr = 2 * key_size + value_size
    for chunk in tl.range(
        tl.program_id(1), tl.load(numbers_ptr), tl.num_programs(1), disable_licm=True
    ):
        prompt, first, start, end, written = _chunk(numbers_ptr, chunk, max_chunks, max_prompts)
        signed = tl.load(slots_ptr + prompt)
        tail_ptr = conv_ptr + tl.abs(signed) * ((WIDTH - 1) * channels)
        source = (mixed_ptr + first * mixed_row, mixed_row, tail_ptr, start, end, signed > 0)
        if head < 2 * KEY_HEADS:
            channel, is_q = head * KEY_DIM + tl.arange(0, KEY_DIM), head < KEY_HEADS
            # The columns of k lie behind those of q.
            out_ptr = tl.where(is_q, q_ptr, k_ptr - key_size) + first * key_size
            _convolve_head(
                *(source, weight_ptr, out_ptr, written, channel, channel),
                *(tl.where(is_q, scale, 1.0), eps, True, key_size, channels, WIDTH, ROWS),
            )
        elif head < 2 * KEY_HEADS + HEADS:
            column = (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)
            _convolve_head(
                *(source, weight_ptr, v_ptr + first * value_size, written, column),
                *(2 * key_size + column, 1.0, eps, False, value_size, channels, WIDTH, ROWS),
            )
        else:
            _store_gates(
                *(gates_ptr + chunk * (HEADS * 4 * SIZE), end),
                *(a_ptr + first * a_row, a_row, b_ptr + first * b_row, b_row),
                *(neg_exp_a_ptr, dt_bias_ptr, HEADS),
            )


@triton.jit
def _inverse(system, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """Return (I + A)^-1, float32, of a strictly lower A of 64 x 64, by halves: blocks of 2, 4, .. 64.

    With X the inverse of the blocks on the diagonal, the inverse of the doubled blocks is X less the blocks of X A X
    between two neighbours. Entries of all these inverses are at most 1 where keys have norms of 1, so operands of 16
    bits lose no more than their rounding; a Neumann series of A would lose all digits for equal keys.
    """
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i >> 1 == j >> 1, system, 0.0)
    system = system.to(DTYPE)
    for level in range(1, 6):
        known, left = inverse.to(DTYPE), j >> level
        product = tl.dot(known, system, input_precision=PRECISION)
        product = tl.dot(product.to(DTYPE), known, input_precision=PRECISION)
        neighbours = (i >> level) == tl.where(left % 2 == 0, left + 1, -1)
        inverse -= tl.where(neighbours, product, 0.0)
    return inverse


@triton.jit(do_not_specialize=["numbers_ptr", "max_chunks", "max_prompts"])
def _couple(
    q_ptr,
    k_ptr,
    gates_ptr,
    numbers_ptr,
    max_chunks,
    max_prompts,
    inverse_ptr,
    scores_ptr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Take one value head of some chunks."""
    head, place = tl.program_id(0), tl.arange(0, SIZE)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    key_size: tl.constexpr = KEY_HEADS * KEY_DIM
    i, j = place[:, None], place[None, :]
    for chunk in tl.range(
        tl.program_id(1), tl.load(numbers_ptr), tl.num_programs(1), disable_licm=True
    ):
        _, first, _, end, written = _chunk(numbers_ptr, chunk, max_chunks, max_prompts)
        # Rows count from the chunk's first, because wide addresses of all rows take more registers than there are.
        at = i * key_size + tl.arange(0, KEY_DIM)[None, :]
        chunk_at, real = first * key_size + key_head * KEY_DIM, (i < end) & (at >= 0)
        q = tl.load(q_ptr + chunk_at + at, mask=real, other=0.0)
        k = tl.load(k_ptr + chunk_at + at, mask=real, other=0.0)
        gates_at = gates_ptr + (chunk * VALUE_HEADS + head) * (4 * SIZE)
        decay, beta = tl.load(gates_at + place), tl.load(gates_at + SIZE + place)
        pairs = power_of_two(tl.where(i >= j, decay[:, None] - decay[None, :], 0.0))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * pairs
        scores = tl.where(i >= j, scores, 0.0).to(scores_ptr.dtype.element_ty)
        square_at = (first * VALUE_HEADS + head) * SIZE
        square, mask = i * (VALUE_HEADS * SIZE) + j, i < written
        tl.store(scores_ptr + square_at + square, scores, mask=mask)
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * (pairs * beta[:, None])
        system = tl.where(i > j, system, 0.0)
        inverse = _finite(_inverse(system, PRECISION, DTYPE) * beta[None, :])
        inverse = inverse.to(inverse_ptr.dtype.element_ty)
        tl.store(inverse_ptr + square_at + square, inverse, mask=mask)


def prepare_chunks(
    mixed_TC: torch.Tensor,
    a_TV: torch.Tensor,
    b_TV: torch.Tensor,
    conv_weight_Cw: torch.Tensor,
    neg_exp_a_V: torch.Tensor,
    dt_bias_V: torch.Tensor,
    table: PromptTable,
    conv: torch.Tensor,
    heads: tuple[int, int, int, int],
    eps: float,
) -> Prepared:
    """Return what the recurrence reads of the rows of prompts. See `LinearAttention` for the arithmetic.

    conv    the pool [slots, w-1, C]; its tails stay as they are
    heads   K, V, k, v
    """
    gates = (a_TV, b_TV, neg_exp_a_V, dt_bias_V)
    rows = convolve_prompts(mixed_TC, conv_weight_Cw, gates, table, conv, heads, eps)
    square = len(rows.v), heads[1], CHUNK
    prepared = Prepared(
        **vars(rows), inverse=rows.v.new_empty(square), scores=rows.v.new_empty(square)
    )
    _launch_couple(prepared, table)
    return prepared


def convolve_prompts(
    mixed_TC: torch.Tensor,
    conv_weight_Cw: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    table: PromptTable,
    conv: torch.Tensor,
    heads: tuple[int, int, int, int],
    eps: float,
) -> Convolved:
    """Return q, k, v and the gates of the rows of prompts; arguments as of `prepare_chunks`.

    gates   a_TV, b_TV, neg_exp_a_V and dt_bias_V
    """
    num_key_heads, num_heads, key_dim, value_dim = heads
    new, num_rows = mixed_TC.new_empty, len(mixed_TC) + CHUNK
    convolved = Convolved(
        new(num_rows, num_key_heads, key_dim),
        new(num_rows, num_key_heads, key_dim),
        new(num_rows, num_heads, value_dim),
        new(table.max_chunks + 1, num_heads, 4, CHUNK, dtype=torch.float32),
    )
    a_TV, b_TV, neg_exp_a_V, dt_bias_V = gates
    assert mixed_TC.stride(1) == a_TV.stride(1) == b_TV.stride(1) == 1
    assert conv_weight_Cw.is_contiguous() and conv_weight_Cw.shape[1] <= 4
    _convolve[(2 * num_key_heads + num_heads + 1, table.chunk_programs)](
        mixed_TC,
        mixed_TC.stride(0),
        a_TV,
        a_TV.stride(0),
        b_TV,
        b_TV.stride(0),
        conv_weight_Cw,
        neg_exp_a_V,
        dt_bias_V,
        table.numbers,
        table.max_chunks,
        table.max_prompts,
        table.slots,
        conv,
        convolved.q,
        convolved.k,
        convolved.v,
        convolved.gates,
        key_dim**-0.5,
        eps,
        KEY_HEADS=num_key_heads,
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=conv_weight_Cw.shape[1],
        ROWS=ROWS_AT_A_TIME,
        num_warps=4,
        num_stages=1,
    )
    return convolved


def _launch_couple(prepared: Prepared, table: PromptTable) -> None:
    """Write the inverses and the scores."""
    num_key_heads, key_dim = prepared.k.shape[1:]
    num_heads, dtype = prepared.v.shape[1], prepared.k.dtype
    _couple[(num_heads, table.chunk_programs)](
        prepared.q,
        prepared.k,
        prepared.gates,
        table.numbers,
        table.max_chunks,
        table.max_prompts,
        prepared.inverse,
        prepared.scores,
        KEY_HEADS=num_key_heads,
        VALUE_HEADS=num_heads,
        KEY_DIM=key_dim,
        PRECISION=precision(dtype),
        DTYPE=tl.float32 if dtype == torch.float32 else tl.float16,
        num_warps=4,
        num_stages=1,
        maxnreg=168,
    )
