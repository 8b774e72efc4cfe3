"""Triton kernel that solves the delta rule within each chunk of prompts: one triangular system a chunk and value head.

In a chunk of 64 tokens with keys k, values v, gates g and beta, let d be the running sum of g, and A the strictly lower
part of beta_i (k_i . k_j) exp(d_i - d_j). The kernel returns u = (I + A)^-1 (beta v) and
w = (I + A)^-1 (beta exp(d) k): a state S before the chunk makes the tokens' values u - w S. This is the WY form of Yang
et al., "Gated Delta Networks". Blocks of 16 tokens are inverted each, the other blocks follow by substitution.

T tokens, N chunks, K key heads, V value heads, k key dim, v value dim.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.delta_conv import CHUNK
from kernels.triton.delta_gates import decay_and_beta, precision

BLOCK = 16  # of the four blocks that the kernel spells out


@triton.jit
def _gates(row, end, a_ptr, a_row, b_ptr, b_row, neg_exp_a, dt_bias):
    """Return g and beta of some rows, zeros from `end` on."""
    real = row < end
    a = tl.load(a_ptr + row * a_row, mask=real, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_row, mask=real, other=0.0).to(tl.float32)
    g, beta = decay_and_beta(a, b, neg_exp_a, dt_bias)
    return tl.where(real, g, 0.0), tl.where(real, beta, 0.0)


@triton.jit
def _load(x_ptr, row, end, stride, dim):
    real = (row < end)[:, None]
    return tl.load(x_ptr + row[:, None] * stride + dim[None, :], mask=real, other=0.0)


@triton.jit
def _scaled(x_ptr, row, end, stride, dim, factor):
    """Return rows of x times a factor each, float32."""
    return _load(x_ptr, row, end, stride, dim).to(tl.float32) * factor[:, None]


@triton.jit
def _store(x_ptr, row, end, stride, dim, x):
    at = x_ptr + row[:, None] * stride + dim[None, :]
    tl.store(at, x.to(x_ptr.dtype.element_ty), mask=(row < end)[:, None])


@triton.jit
def _store_blocks(x_ptr, row, end, stride, dim, x0, x1, x2, x3, SIZE: tl.constexpr):
    _store(x_ptr, row, end, stride, dim, x0)
    _store(x_ptr, row + SIZE, end, stride, dim, x1)
    _store(x_ptr, row + 2 * SIZE, end, stride, dim, x2)
    _store(x_ptr, row + 3 * SIZE, end, stride, dim, x3)


@triton.jit
def _scores(q, k, decay, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    """Return (q_i . k_j) exp(d_i - d_j), zeros above the diagonal."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    exponent = tl.where(i >= j, decay[:, None] - decay[None, :], 0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * tl.exp(exponent)
    return tl.where(i >= j, scores, 0.0)


@triton.jit
def _coupling(k_i, decay_i, beta_i, k_j, decay_j, PRECISION: tl.constexpr):
    """Return beta_i (k_i . k_j) exp(d_i - d_j) of a block of rows i and an earlier block of rows j."""
    products = tl.dot(k_i, tl.trans(k_j), input_precision=PRECISION)
    return products * tl.exp(decay_i[:, None] - decay_j[None, :]) * beta_i[:, None]


@triton.jit
def _inverse(k, decay, beta, EXACT: tl.constexpr, SIZE: tl.constexpr):
    """Return (I + A)^-1 of a block of 16 as (I - A)(I + A^2)(I + A^4)(I + A^8), because A^16 is 0."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    products = tl.dot(k, tl.trans(k), input_precision=EXACT)
    exponent = tl.where(i > j, decay[:, None] - decay[None, :], 0.0)
    power = tl.where(i > j, products * tl.exp(exponent) * beta[:, None], 0.0)
    inverse = tl.where(i == j, 1.0, 0.0) - power
    for _ in tl.static_range(3):
        power = tl.dot(power, power, input_precision=EXACT)
        inverse += tl.dot(inverse, power, input_precision=EXACT)
    return inverse


@triton.jit
def _substitute(
    t0, t1, t2, t3, a10, a20, a21, a30, a31, a32, x0, x1, x2, x3, PRECISION: tl.constexpr
):
    """Return (I + A)^-1 x: t are the inverses of the blocks of I + A on the diagonal, a the blocks below it."""
    x0 = tl.dot(t0, x0, input_precision=PRECISION)
    x1 -= tl.dot(a10, x0, input_precision=PRECISION)
    x1 = tl.dot(t1, x1, input_precision=PRECISION)
    x2 -= tl.dot(a20, x0, input_precision=PRECISION)
    x2 -= tl.dot(a21, x1, input_precision=PRECISION)
    x2 = tl.dot(t2, x2, input_precision=PRECISION)
    x3 -= tl.dot(a30, x0, input_precision=PRECISION)
    x3 -= tl.dot(a31, x1, input_precision=PRECISION)
    x3 -= tl.dot(a32, x2, input_precision=PRECISION)
    return x0, x1, x2, tl.dot(t3, x3, input_precision=PRECISION)


@triton.jit
def _solve_blocks(
    k_ptr,
    v_ptr,
    u_ptr,
    w_ptr,
    r0,
    end,
    key_row,
    value_row,
    w_row,
    key,
    value,
    a_ptr,
    a_row,
    b_ptr,
    b_row,
    neg_exp_a,
    dt_bias,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write u and w of the 4 blocks of a chunk."""
    r1, r2, r3 = r0 + SIZE, r0 + 2 * SIZE, r0 + 3 * SIZE
    d0, beta0 = _gates(r0, end, a_ptr, a_row, b_ptr, b_row, neg_exp_a, dt_bias)
    d1, beta1 = _gates(r1, end, a_ptr, a_row, b_ptr, b_row, neg_exp_a, dt_bias)
    d2, beta2 = _gates(r2, end, a_ptr, a_row, b_ptr, b_row, neg_exp_a, dt_bias)
    d3, beta3 = _gates(r3, end, a_ptr, a_row, b_ptr, b_row, neg_exp_a, dt_bias)
    sum0 = tl.sum(d0)
    sum1 = sum0 + tl.sum(d1)
    sum2 = sum1 + tl.sum(d2)
    d0, d1 = tl.cumsum(d0, 0), sum0 + tl.cumsum(d1, 0)
    d2, d3 = sum1 + tl.cumsum(d2, 0), sum2 + tl.cumsum(d3, 0)
    k0, k1 = _load(k_ptr, r0, end, key_row, key), _load(k_ptr, r1, end, key_row, key)
    k2, k3 = _load(k_ptr, r2, end, key_row, key), _load(k_ptr, r3, end, key_row, key)
    t0, t1 = _inverse(k0, d0, beta0, EXACT, SIZE), _inverse(k1, d1, beta1, EXACT, SIZE)
    t2, t3 = _inverse(k2, d2, beta2, EXACT, SIZE), _inverse(k3, d3, beta3, EXACT, SIZE)
    a10 = _coupling(k1, d1, beta1, k0, d0, PRECISION)
    a20 = _coupling(k2, d2, beta2, k0, d0, PRECISION)
    a21 = _coupling(k2, d2, beta2, k1, d1, PRECISION)
    a30 = _coupling(k3, d3, beta3, k0, d0, PRECISION)
    a31 = _coupling(k3, d3, beta3, k1, d1, PRECISION)
    a32 = _coupling(k3, d3, beta3, k2, d2, PRECISION)
    x0 = _scaled(v_ptr, r0, end, value_row, value, beta0)
    x1 = _scaled(v_ptr, r1, end, value_row, value, beta1)
    x2 = _scaled(v_ptr, r2, end, value_row, value, beta2)
    x3 = _scaled(v_ptr, r3, end, value_row, value, beta3)
    x0, x1, x2, x3 = _substitute(
        t0, t1, t2, t3, a10, a20, a21, a30, a31, a32, x0, x1, x2, x3, PRECISION
    )
    _store_blocks(u_ptr, r0, end, value_row, value, x0, x1, x2, x3, SIZE)
    y0, y1 = k0 * (beta0 * tl.exp(d0))[:, None], k1 * (beta1 * tl.exp(d1))[:, None]
    y2, y3 = k2 * (beta2 * tl.exp(d2))[:, None], k3 * (beta3 * tl.exp(d3))[:, None]
    y0, y1, y2, y3 = _substitute(
        t0, t1, t2, t3, a10, a20, a21, a30, a31, a32, y0, y1, y2, y3, PRECISION
    )
    _store_blocks(w_ptr, r0, end, w_row, key, y0, y1, y2, y3, SIZE)


@triton.jit(
    do_not_specialize=["chunks_ptr", "prompts_ptr", "num_chunks", "num_prompts", "a_ptr", "b_ptr"]
)
def _solve(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    a_row,
    b_ptr,
    b_row,
    neg_exp_a_ptr,
    dt_bias_ptr,
    chunks_ptr,
    num_chunks,
    prompts_ptr,
    num_prompts,
    u_ptr,
    w_ptr,
    scores_ptr,
    decay_ptr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Take one value head of one chunk of 4 blocks of SIZE tokens."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys: tl.constexpr = KEY_HEADS * KEY_DIM
    first = tl.load(chunks_ptr + num_chunks + chunk).to(tl.int64)
    end = tl.load(prompts_ptr + num_prompts + tl.load(chunks_ptr + chunk)).to(tl.int64)
    if first >= end:
        return
    neg_exp_a, dt_bias = tl.load(neg_exp_a_ptr + head), tl.load(dt_bias_ptr + head)
    a_ptr, b_ptr = a_ptr + head, b_ptr + head
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    key, value = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    q_ptr, k_ptr = q_ptr + key_head * KEY_DIM, k_ptr + key_head * KEY_DIM
    row, place = first + tl.arange(0, 4 * SIZE), tl.arange(0, 4 * SIZE)
    g, _ = _gates(row, end, a_ptr, a_row, b_ptr, b_row, neg_exp_a, dt_bias)
    decay = tl.cumsum(g, 0)
    tl.store(decay_ptr + row * VALUE_HEADS + head, decay, mask=row < end)
    q, k = _load(q_ptr, row, end, keys, key), _load(k_ptr, row, end, keys, key)
    scores = _scores(q, k, decay, PRECISION, 4 * SIZE)
    scores_at = scores_ptr + (chunk * VALUE_HEADS + head) * (16 * SIZE * SIZE)
    scores_at = scores_at + place[:, None] * (4 * SIZE) + place[None, :]
    tl.store(scores_at, scores.to(scores_ptr.dtype.element_ty))
    _solve_blocks(
        *(k_ptr, v_ptr + head * VALUE_DIM, u_ptr + head * VALUE_DIM, w_ptr + head * KEY_DIM),
        *(first + tl.arange(0, SIZE), end, keys, VALUE_HEADS * VALUE_DIM, VALUE_HEADS * KEY_DIM),
        *(key, value, a_ptr, a_row, b_ptr, b_row, neg_exp_a, dt_bias),
        *(PRECISION, EXACT, SIZE),
    )


def solve_chunks(
    q_TKk: torch.Tensor,
    k_TKk: torch.Tensor,
    v_TVv: torch.Tensor,
    a_TV: torch.Tensor,
    b_TV: torch.Tensor,
    neg_exp_a_V: torch.Tensor,
    dt_bias_V: torch.Tensor,
    chunks_2N: torch.Tensor,
    prompts_2n: torch.Tensor,
    *,
    num_warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return u [T, V, v], w [T, V, k], the masked scores [N, V, 64, 64] of q and k, and float32 d [T, V].

    q, k, v   from `convolve_prompts`, with its chunks and prompts
    """
    num_tokens, num_key_heads, key_dim = k_TKk.shape
    num_heads, value_dim = v_TVv.shape[1:]
    num_chunks = chunks_2N.shape[1]
    assert a_TV.stride(1) == b_TV.stride(1) == 1
    u, w = torch.empty_like(v_TVv), k_TKk.new_empty(num_tokens, num_heads, key_dim)
    scores = k_TKk.new_empty(num_chunks, num_heads, CHUNK, CHUNK)
    decay = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=k_TKk.device)
    _solve[(num_heads, num_chunks)](
        q_TKk,
        k_TKk,
        v_TVv,
        a_TV,
        a_TV.stride(0),
        b_TV,
        b_TV.stride(0),
        neg_exp_a_V,
        dt_bias_V,
        chunks_2N,
        num_chunks,
        prompts_2n,
        prompts_2n.shape[1],
        u,
        w,
        scores,
        decay,
        KEY_HEADS=num_key_heads,
        VALUE_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PRECISION=precision(k_TKk.dtype),
        EXACT="tf32x3",
        SIZE=BLOCK,
        num_warps=num_warps,
    )
    return u, w, scores, decay
