"""Triton kernel for decodes of gated delta nets, with drafts or without: it reads and writes each state once.

That takes most of the time. Each program holds a part of one head's state, and loads it while the kernel before reads
the rows (`delta_inputs`). It advances the state by the drafts that the step before accepted, by the row that counts,
after which it writes the state, and by the drafts of this step.

T rows, B sequences, C channels, K key heads, V value heads, G = V / K, k key dim, v value dim, w conv width, D drafts
of a slot, X = C + 2V.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.delta_inputs import num_kept, read_decodes, rows_of
from kernels.triton.delta_table import DecodeTable
from kernels.triton.pdl import begin, dependent_launch

BLOCK_V = 64


@triton.jit
def _advance_row(
    state, x_ptr, key_at, value_at, gates_at, KEY_SIZE: tl.constexpr, VALUE_HEADS: tl.constexpr
):
    """Return the state behind a row, and S^T q of it; `at` are places in the row."""
    q, k, v = tl.load(x_ptr + key_at), tl.load(x_ptr + KEY_SIZE + key_at), tl.load(x_ptr + value_at)
    decay, beta = tl.load(x_ptr + gates_at), tl.load(x_ptr + gates_at + VALUE_HEADS)
    # S^T q of the new state follows from the old one, so one pass suffices.
    read_k = tl.sum(state * k[:, None], 0)
    read_q = tl.sum(state * q[:, None], 0)
    delta = beta * (v - decay * read_k)
    out = decay * read_q + tl.sum(q * k) * delta
    return decay * state + k[:, None] * delta[None, :], out


@triton.jit
def _advance_rows(
    state,
    state_at,
    x_ptr,
    out_at,
    key_at,
    value_at,
    gates_at,
    kept,
    rows,
    before,
    KEY_SIZE: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    DRAFTS: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """Advance the state by the old drafts that count and by the rows of a sequence, and write the outputs of these."""
    dtype: tl.constexpr = state_at.dtype.element_ty
    if DRAFTS:
        for _ in range(kept):
            state, _out = _advance_row(
                state, x_ptr, key_at, value_at, gates_at, KEY_SIZE, VALUE_HEADS
            )
            state = state.to(dtype).to(tl.float32)  # as a step without drafts would read it
            x_ptr += SIZE
    state, out = _advance_row(state, x_ptr, key_at, value_at, gates_at, KEY_SIZE, VALUE_HEADS)
    tl.store(out_at, out.to(out_at.dtype.element_ty))
    if before == 0:
        tl.store(state_at, state.to(dtype))
    if SEVERAL:
        for _ in range(1, rows):
            state = state.to(dtype).to(tl.float32)
            x_ptr += SIZE
            out_at += ROW
            state, out = _advance_row(
                state, x_ptr, key_at, value_at, gates_at, KEY_SIZE, VALUE_HEADS
            )
            tl.store(out_at, out.to(out_at.dtype.element_ty))


@triton.jit(do_not_specialize=["slots_ptr", "starts_ptr", "num_rows"])
def _advance(
    x_ptr,
    slots_ptr,
    starts_ptr,
    accepted_ptr,
    state_ptr,
    out_ptr,
    num_rows,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
    SEVERAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take BLOCK columns of one value head of one sequence."""
    parts: tl.constexpr = VALUE_DIM // BLOCK
    value_heads: tl.constexpr = KEY_HEADS * GROUP
    key_size: tl.constexpr = KEY_HEADS * KEY_DIM
    row_out: tl.constexpr = value_heads * VALUE_DIM
    size: tl.constexpr = 2 * key_size + row_out + 2 * value_heads
    head, seq = tl.program_id(0) // parts, tl.program_id(1).to(tl.int64)
    key, value = tl.arange(0, KEY_DIM), tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    signed = tl.load(slots_ptr + seq)
    state_at = state_ptr + (tl.abs(signed) * value_heads + head) * (KEY_DIM * VALUE_DIM)
    state_at = state_at + key[:, None] * VALUE_DIM + value[None, :]
    # Before `begin`, because no kernel of this step has written states of this layer's decodes.
    old = tl.load(state_at, mask=(signed > 0) & (key[:, None] >= 0), other=0.0)
    begin(PDL)
    start, end, before = rows_of(starts_ptr, seq, SEVERAL)
    column = head * VALUE_DIM + value
    out_at, zeros = out_ptr + column, tl.zeros([BLOCK], tl.float32).to(out_ptr.dtype.element_ty)
    if signed == 0:
        for row in range(start, end):
            tl.store(out_at + row * row_out, zeros)
    else:
        kept = num_kept(accepted_ptr, signed, before, DRAFTS)
        _advance_rows(
            *(old.to(tl.float32), state_at, x_ptr + (start + seq * DRAFTS) * size),
            *(out_at + start * row_out, head // GROUP * KEY_DIM + key, 2 * key_size + column),
            *(2 * key_size + row_out + head, kept, (end - start).to(tl.int32), before),
            *(key_size, value_heads, row_out, size, DRAFTS, SEVERAL),
        )
    if SEVERAL:  # rows of padding
        last = tl.load(starts_ptr + 1 + tl.num_programs(1)).to(tl.int64)
        for row in range(last + seq, num_rows, tl.num_programs(1)):
            tl.store(out_at + row * row_out, zeros)


def advance_decodes(
    mixed_TC: torch.Tensor,
    a_TV: torch.Tensor,
    b_TV: torch.Tensor,
    conv_weight_Cw: torch.Tensor,
    neg_exp_a_V: torch.Tensor,
    dt_bias_V: torch.Tensor,
    table: DecodeTable,
    pools: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    out_TVv: torch.Tensor,
    *,
    num_key_heads: int,
    eps: float,
) -> None:
    """Advance each slot by its sequence's accepted drafts and rows, and write outputs. See `LinearAttention`.

    pools   conv [slots, w-1, C], state [slots, V, k, v], drafts [slots, D, X] and accepted [slots]
    out     contiguous; rows of the table's sequences, and rows behind them up to `table.num_rows`, which get zeros
    """
    if not len(table.slots):
        return
    conv, state, drafts, accepted = pools
    _, num_heads, key_dim, value_dim = state.shape
    assert out_TVv.is_contiguous() and state.is_contiguous()
    heads = num_key_heads, num_heads, key_dim, value_dim
    weights = conv_weight_Cw, neg_exp_a_V, dt_bias_V
    read = conv, drafts, accepted
    x_RX = read_decodes(mixed_TC, a_TV, b_TV, *weights, table, read, heads, eps)
    block = min(BLOCK_V, value_dim)
    _advance[(num_heads * (value_dim // block), len(table.slots))](
        *(x_RX, table.slots, table.starts_or_any, accepted, state, out_TVv, table.num_rows),
        KEY_HEADS=num_key_heads,
        GROUP=num_heads // num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK=block,
        DRAFTS=drafts.shape[1],
        SEVERAL=table.starts is not None,
        **dependent_launch(table.most_rows),
        num_warps=2,
    )
