"""Triton kernel that carries the states of gated delta nets from chunk to chunk and returns the outputs of prompts.

A program holds the columns of one head's state in registers, from the first chunk of a prompt to its last. It holds
them transposed, because the tensor cores of Hopper take the left operand of a product from registers: no product but
those of loaded tiles waits for shared memory.

T tokens, C channels, K key heads, V value heads, k key dim, v value dim, w conv width.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.delta_conv import store_tail
from kernels.triton.delta_gates import CHUNKS_AT, SIZE, precision
from kernels.triton.delta_prepare import Prepared
from kernels.triton.delta_table import PromptTable

# On an H200 one prompt of 8,192 tokens takes 201 us, with 128 columns 321 us; 8 prompts of 1,024 tokens take 133 and
# 100 us. The number of prompts does not choose the columns, because a step with another choice would compile.
BLOCK_V = 64


@triton.jit
def _zero_padding(out_ptr, column, num_real, num_rows, row_size):
    """Zero some columns of the rows behind the real ones; the programs of one head share the rows."""
    place = tl.arange(0, SIZE)
    zeros = tl.zeros([SIZE, column.shape[0]], tl.float32).to(out_ptr.dtype.element_ty)
    for first in range(num_real + tl.program_id(2) * SIZE, num_rows, tl.num_programs(2) * SIZE):
        row = (first + place).to(tl.int64)
        at = row[:, None] * row_size + column[None, :]
        tl.store(out_ptr + at, zeros, mask=(row < num_rows)[:, None])


@triton.jit
def _load(x_ptr, row_size, row, column):
    """Return rows of a chunk without a mask; those behind the prompt are finite, and leave nothing."""
    return tl.load(x_ptr + (row[:, None] * row_size + column[None, :]))


@triton.jit
def _advance(
    state,
    total,
    q_ptr,
    k_ptr,
    v_ptr,
    inverse_ptr,
    scores_ptr,
    gates_ptr,
    value,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the state behind a chunk and the outputs of the chunk, both transposed; pointers point to the chunk."""
    key, place = tl.arange(0, KEY_DIM), tl.arange(0, SIZE)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    grown, left = tl.load(gates_ptr + 2 * SIZE + place), tl.load(gates_ptr + 3 * SIZE + place)
    rounded = state.to(dtype)
    k = _load(k_ptr, KEY_SIZE, place, key)
    read = tl.dot(rounded, tl.trans(k), input_precision=PRECISION) * grown[None, :]
    inverse = _load(inverse_ptr, ROW, place, place)
    v = _load(v_ptr, VALUE_SIZE, place, value)
    new = tl.dot(tl.trans(v), tl.trans(inverse), input_precision=PRECISION)
    read = (-read).to(dtype)
    new = tl.dot(read, tl.trans(inverse), acc=new, input_precision=PRECISION)
    q = _load(q_ptr, KEY_SIZE, place, key)
    out = tl.dot(rounded, tl.trans(q), input_precision=PRECISION) * grown[None, :]
    scores = _load(scores_ptr, ROW, place, place)
    out = tl.dot(new.to(dtype), tl.trans(scores), acc=out, input_precision=PRECISION)
    kept = (new * left[None, :]).to(dtype)
    return tl.dot(kept, k, acc=state * total, input_precision=PRECISION), out


@triton.jit
def _advance_prompt(
    state,
    start,
    end,
    q_ptr,
    k_ptr,
    v_ptr,
    inverse_ptr,
    scores_ptr,
    gates_ptr,
    out_ptr,
    value,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the outputs of a prompt; return the state behind it. Pointers point to the head of row 0, those of gates
    to the prompt's first chunk."""
    place, row_size = tl.arange(0, SIZE), HEADS * SIZE
    total = tl.load(gates_ptr + (3 * SIZE - 1))
    for first in range(start, end, SIZE):
        at = start.to(tl.int64) + (first - start)
        # The next chunk's, because a product would wait for this one's.
        later = tl.load(gates_ptr + (HEADS * 4 * SIZE + 3 * SIZE - 1))
        state, out = _advance(
            *(state, total, q_ptr + at * KEY_SIZE, k_ptr + at * KEY_SIZE, v_ptr + at * VALUE_SIZE),
            *(inverse_ptr + at * row_size, scores_ptr + at * row_size, gates_ptr, value),
            *(KEY_SIZE, VALUE_SIZE, HEADS * SIZE, KEY_DIM, PRECISION),
        )
        out_at = out_ptr + at * VALUE_SIZE + (place[:, None] * VALUE_SIZE + value[None, :])
        out = tl.trans(out.to(out_ptr.dtype.element_ty))
        tl.store(out_at, out, mask=(first + place < end)[:, None])
        total = later
        gates_ptr += HEADS * 4 * SIZE
    return state


@triton.jit(do_not_specialize=["numbers_ptr", "max_chunks", "max_prompts", "slots_ptr", "num_rows"])
def _scan(
    mixed_ptr,
    mixed_row,
    q_ptr,
    k_ptr,
    v_ptr,
    inverse_ptr,
    scores_ptr,
    gates_ptr,
    numbers_ptr,
    max_chunks,
    max_prompts,
    slots_ptr,
    conv_ptr,
    state_ptr,
    out_ptr,
    num_rows,
    KEY_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take BLOCK columns of one value head of some prompts, and a share of their tails' channels."""
    part, head = tl.program_id(0), tl.program_id(1)
    prompts_ptr = numbers_ptr + CHUNKS_AT + 2 * max_chunks
    value, key = part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, KEY_DIM)
    size: tl.constexpr = HEADS * VALUE_DIM
    channels: tl.constexpr = 2 * KEY_SIZE + size
    own: tl.constexpr = triton.cdiv(channels, size // BLOCK)  # the program's channels
    place = tl.arange(0, triton.next_power_of_2(own))
    channel = (head * (VALUE_DIM // BLOCK) + part) * own + place
    exists = (place < own) & (channel < channels)
    key_at = (head // GROUP) * KEY_DIM
    out_ptr += head * VALUE_DIM
    _zero_padding(out_ptr, value, tl.load(numbers_ptr + 2), num_rows, size)
    for prompt in tl.range(
        tl.program_id(2), tl.load(numbers_ptr + 1), tl.num_programs(2), disable_licm=True
    ):
        start, end = tl.load(prompts_ptr + prompt), tl.load(prompts_ptr + max_prompts + prompt)
        chunk = tl.load(prompts_ptr + 2 * max_prompts + prompt)
        signed = tl.load(slots_ptr + prompt)
        if TAIL:
            tail_ptr = conv_ptr + tl.abs(signed) * (TAIL * channels)
            store_tail(
                mixed_ptr, mixed_row, start, end, signed, tail_ptr, channel, exists, channels, TAIL
            )
        state_at = state_ptr + (tl.abs(signed) * HEADS + head) * (KEY_DIM * VALUE_DIM)
        state_at = state_at + key[None, :] * VALUE_DIM + value[:, None]
        state = tl.load(state_at, mask=(signed > 0) & (key[None, :] >= 0), other=0.0).to(tl.float32)
        state = _advance_prompt(
            *(state, start, end, q_ptr + key_at, k_ptr + key_at, v_ptr + head * VALUE_DIM),
            *(inverse_ptr + head * SIZE, scores_ptr + head * SIZE),
            *(gates_ptr + (chunk * HEADS + head) * (4 * SIZE), out_ptr, value),
            *(KEY_SIZE, size, KEY_DIM, HEADS, PRECISION),
        )
        tl.store(state_at, state, mask=(signed != 0) & (key[None, :] >= 0))


def _stages(dtype: torch.dtype, key_dim: int) -> int:
    """Return the chunks in shared memory, which 3 chunks of longer heads and 2 of float32 exceed."""
    if dtype == torch.float32:
        return 1
    return 2 if key_dim > 128 else 3


def scan_chunks(
    prepared: Prepared,
    mixed_TC: torch.Tensor,
    table: PromptTable,
    conv: torch.Tensor,
    state: torch.Tensor,
    out_TVv: torch.Tensor,
) -> None:
    """Write the outputs of prompts and zeros behind the real rows, and the state and the tail of each prompt.

    prepared     from `prepare_chunks` with the same table
    conv, state  the pools [slots, w-1, C] and [slots, V, k, v]
    out          contiguous; rows of decodes stay as they are
    """
    _, num_heads, key_dim, value_dim = state.shape
    num_key_heads = prepared.k.shape[1]
    block, dtype = min(BLOCK_V, value_dim), mixed_TC.dtype
    assert out_TVv.is_contiguous() and state.is_contiguous() and mixed_TC.stride(1) == 1
    _scan[(value_dim // block, num_heads, table.prompt_programs)](
        mixed_TC,
        mixed_TC.stride(0),
        prepared.q,
        prepared.k,
        prepared.v,
        prepared.inverse,
        prepared.scores,
        prepared.gates,
        table.numbers,
        table.max_chunks,
        table.max_prompts,
        table.slots,
        conv,
        state,
        out_TVv,
        len(out_TVv),
        KEY_SIZE=num_key_heads * key_dim,
        GROUP=num_heads // num_key_heads,
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TAIL=conv.shape[1],
        BLOCK=block,
        PRECISION=precision(dtype),
        num_warps=4,
        num_stages=_stages(dtype, key_dim),
    )
