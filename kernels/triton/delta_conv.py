"""Functions that the Triton kernels of gated delta nets share: the causal convolution of prompts, and its tails.

C channels, w conv width.
"""

import triton
import triton.language as tl

from kernels.triton.delta_gates import silu_rounded


@triton.jit
def _taps(weight_ptr, column, WIDTH: tl.constexpr):
    """Return the weights of some channels, float32: of the token 3, 2, 1 and 0 places back; without a tap 0."""
    tap = tl.arange(0, 4) + (WIDTH - 4)
    at = weight_ptr + column[:, None] * WIDTH + tap[None, :]
    weights = tl.load(at, mask=(tap >= 0)[None, :] & (column >= 0)[:, None], other=0.0)
    pairs = weights.to(tl.float32).reshape(column.shape[0], 2, 2)
    even, odd = tl.split(pairs)
    third, first = tl.split(even)
    second, own = tl.split(odd)
    return third[None, :], second[None, :], first[None, :], own[None, :]


@triton.jit
def _row(x_ptr, x_row, source, start, length, column):
    """Return a row of the prompt, float32; zeros outside of it."""
    inside = (source - start).to(tl.uint32) < length
    x = tl.load(x_ptr + source * x_row + column, mask=inside & (column >= 0), other=0.0)
    return x.to(tl.float32)


@triton.jit
def _old(tail_ptr, place, column, BACK: tl.constexpr, CHANNELS: tl.constexpr, TAIL: tl.constexpr):
    """Return the rows BACK places before the first rows of a prompt, zeros for later rows."""
    at = tail_ptr + (place + (TAIL - BACK)) * CHANNELS + column
    return tl.load(at, mask=(place < BACK) & (column >= 0), other=0.0).to(tl.float32)


@triton.jit
def convolve_rows(
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
    tail_ptr      the rows before the prompt, oldest first, where `known` is true
    """
    third, second, first, own = _taps(weight_ptr, column, WIDTH)
    rows, columns, length = place[:, None], column[None, :], (end - start).to(tl.uint32)
    sums = own * _row(x_ptr, x_row, rows, start, length, columns)
    if WIDTH > 1:
        sums += first * _row(x_ptr, x_row, rows - 1, start, length, columns)
    if WIDTH > 2:
        sums += second * _row(x_ptr, x_row, rows - 2, start, length, columns)
    if WIDTH > 3:
        sums += third * _row(x_ptr, x_row, rows - 3, start, length, columns)
    if known & (start == 0):
        if WIDTH > 1:
            sums += first * _old(tail_ptr, rows, columns, 1, CHANNELS, WIDTH - 1)
        if WIDTH > 2:
            sums += second * _old(tail_ptr, rows, columns, 2, CHANNELS, WIDTH - 1)
        if WIDTH > 3:
            sums += third * _old(tail_ptr, rows, columns, 3, CHANNELS, WIDTH - 1)
    return silu_rounded(sums, x_ptr.dtype.element_ty)


@triton.jit
def store_tail(
    mixed_ptr,
    mixed_row,
    start,
    end,
    signed,
    tail_ptr,
    column,
    real,
    CHANNELS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write the last rows of a prompt in some channels to its slot; no other program has the channels."""
    place = tl.arange(0, 4)[:, None]
    source = (end - TAIL + place).to(tl.int64)
    exists = (place < TAIL) & real[None, :]
    at = mixed_ptr + source * mixed_row + column[None, :]
    x = tl.load(at, mask=exists & (source >= start), other=0.0)
    old_at = tail_ptr + (source - start + TAIL) * CHANNELS + column[None, :]
    x += tl.load(old_at, mask=exists & (source < start) & (signed > 0), other=0.0)
    # A short prompt keeps rows of its old tail: all threads must have read them before one writes.
    tl.debug_barrier()
    tl.store(tail_ptr + place * CHANNELS + column[None, :], x, mask=exists & (signed != 0))
