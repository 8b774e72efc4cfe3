"""Triton kernels around a library's kernel for prompts of gated delta nets: gates of tokens, states, tails.

Libraries read exp(g) and beta of each token, and states of prompts one after the other, transposed and in float32.

P rows of prompts, N prompts, C channels, V value heads, k key dim, v value dim, w conv width.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.delta_conv import store_tail
from kernels.triton.delta_gates import decay_and_beta

ROWS, CHANNELS = 32, 256  # of a program


@triton.jit(do_not_specialize=["num_rows", "a_ptr", "b_ptr"])
def token_gates_kernel(
    a_ptr,
    a_row,
    b_ptr,
    b_row,
    neg_exp_a_ptr,
    dt_bias_ptr,
    alpha_ptr,
    beta_ptr,
    num_rows,
    HEADS: tl.constexpr,
    HEADS_2: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Take ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.arange(0, HEADS_2)[None, :]
    mask = (row < num_rows) & (head < HEADS)
    a = tl.load(a_ptr + row * a_row + head, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + head, mask=mask, other=0.0).to(tl.float32)
    neg_exp_a = tl.load(neg_exp_a_ptr + head, mask=head < HEADS, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + head, mask=head < HEADS, other=0.0)
    g, beta = decay_and_beta(a, b, neg_exp_a, dt_bias)
    tl.store(alpha_ptr + row * HEADS + head, tl.exp(g), mask=mask)
    tl.store(beta_ptr + row * HEADS + head, beta, mask=mask)


@triton.jit(do_not_specialize=["slots_ptr"])
def move_states_kernel(
    pool_ptr,
    slots_ptr,
    states_ptr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_POOL: tl.constexpr,
):
    """Take BLOCK columns of one head of one prompt, out of its slot or into it."""
    prompt, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, value = tl.arange(0, KEY_DIM), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    signed = tl.load(slots_ptr + prompt)
    size: tl.constexpr = KEY_DIM * VALUE_DIM
    pool_at = pool_ptr + (tl.abs(signed) * HEADS + head) * size
    pool_at += key[:, None] * VALUE_DIM + value[None, :]
    state_at = states_ptr + (prompt * HEADS + head) * size
    state_at += value[None, :] * KEY_DIM + key[:, None]
    every = (key >= 0)[:, None]
    if TO_POOL:
        state = tl.load(state_at).to(pool_ptr.dtype.element_ty)
        tl.store(pool_at, state, mask=(signed != 0) & every)
    else:
        state = tl.load(pool_at, mask=(signed > 0) & every, other=0.0)
        tl.store(state_at, state.to(tl.float32))


@triton.jit(do_not_specialize=["starts_ptr", "slots_ptr"])
def store_tails_kernel(
    mixed_ptr,
    mixed_row,
    starts_ptr,
    slots_ptr,
    conv_ptr,
    CHANNELS: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take BLOCK channels of one prompt; rows count from the first prompt's first."""
    prompt, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(starts_ptr + prompt), tl.load(starts_ptr + prompt + 1)
    signed = tl.load(slots_ptr + prompt)
    tail_ptr = conv_ptr + tl.abs(signed) * (TAIL * CHANNELS)
    real = column < CHANNELS
    store_tail(mixed_ptr, mixed_row, start, end, signed, tail_ptr, column, real, CHANNELS, TAIL)


def token_gates(
    a_PV: torch.Tensor, b_PV: torch.Tensor, neg_exp_a_V: torch.Tensor, dt_bias_V: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exp(g) and beta, float32 [P, V]; see `LinearAttention` for the arithmetic. Rows may be strided."""
    num_rows, num_heads = a_PV.shape
    assert a_PV.stride(1) == b_PV.stride(1) == 1
    alpha, beta = a_PV.new_empty(2, num_rows, num_heads, dtype=torch.float32).unbind(0)
    token_gates_kernel[(triton.cdiv(num_rows, ROWS),)](
        *(a_PV, a_PV.stride(0), b_PV, b_PV.stride(0), neg_exp_a_V, dt_bias_V, alpha, beta),
        num_rows,
        HEADS=num_heads,
        HEADS_2=triton.next_power_of_2(num_heads),
        ROWS=ROWS,
    )
    return alpha, beta


def read_states(pool: torch.Tensor, slots_N: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, V, v, k]: the states of prompts, zeros for those without one.

    pool    [slots, V, k, v]
    slots   int64: a slot with a state, minus a slot without one, or 0 for none
    """
    _, num_heads, key_dim, value_dim = pool.shape
    states = pool.new_empty(len(slots_N), num_heads, value_dim, key_dim, dtype=torch.float32)
    _move_states(pool, slots_N, states, to_pool=False)
    return states


def write_states(pool: torch.Tensor, slots_N: torch.Tensor, states_NVvk: torch.Tensor) -> None:
    """Write the states of prompts to their slots, if they have one; arguments as of `read_states`."""
    _move_states(pool, slots_N, states_NVvk, to_pool=True)


def _move_states(
    pool: torch.Tensor, slots_N: torch.Tensor, states_NVvk: torch.Tensor, *, to_pool: bool
) -> None:
    _, num_heads, key_dim, value_dim = pool.shape
    assert pool.is_contiguous() and states_NVvk.is_contiguous()
    block = min(32, value_dim)
    move_states_kernel[(len(slots_N), num_heads, value_dim // block)](
        *(pool, slots_N, states_NVvk),
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK=block,
        TO_POOL=to_pool,
    )


def store_tails(
    mixed_PC: torch.Tensor, starts: torch.Tensor, slots_N: torch.Tensor, conv: torch.Tensor
) -> None:
    """Write the last w - 1 rows of each prompt to its slot in `conv`, the pool [slots, w-1, C].

    mixed    rows of prompts, which may be strided
    starts   int64 [N + 1]: the first row of each prompt, and the row behind the last
    """
    _, tail, channels = conv.shape
    if tail:
        store_tails_kernel[(len(slots_N), triton.cdiv(channels, CHANNELS))](
            *(mixed_PC, mixed_PC.stride(0), starts, slots_N, conv),
            CHANNELS=channels,
            TAIL=tail,
            BLOCK=CHANNELS,
        )
