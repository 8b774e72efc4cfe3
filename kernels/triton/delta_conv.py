"""Functions that the Triton kernels of gated delta nets share: the causal convolution of prompts, and its tails.

C channels, w conv width.
"""

import triton
import triton.language as tl

from kernels.triton.delta_gates import silu_rounded


@triton.jit
def taps_of(weight_ptr, column, WIDTH: tl.constexpr):
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
def _sum(taps, x, x_1, x_2, x_3, WIDTH: tl.constexpr):
    """Return the sums of rows and of the rows 1, 2 and 3 places before, times their taps."""
    third, second, first, own = taps
    sums = own * x
    if WIDTH > 1:
        sums += first * x_1
    if WIDTH > 2:
        sums += second * x_2
    if WIDTH > 3:
        sums += third * x_3
    return sums


@triton.jit
def _sum_old(taps, sums, tail_ptr, rows, columns, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sums of rows with those of the rows before the prompt."""
    third, second, first, _ = taps
    if WIDTH > 1:
        sums += first * _old(tail_ptr, rows, columns, 1, CHANNELS, WIDTH - 1)
    if WIDTH > 2:
        sums += second * _old(tail_ptr, rows, columns, 2, CHANNELS, WIDTH - 1)
    if WIDTH > 3:
        sums += third * _old(tail_ptr, rows, columns, 3, CHANNELS, WIDTH - 1)
    return sums


@triton.jit
def convolve_rows(
    x_ptr,
    x_row,
    tail_ptr,
    start,
    end,
    known,
    taps,
    place,
    column,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the convolution of some channels after SiLU, float32, of four rows from each `place` on: four tensors.

    Each of seven rows is read once for the four. Rows from `end` on are any.

    start, end    the rows of the prompt, counted from the chunk's first row, which x_ptr points to
    tail_ptr      the rows before the prompt, oldest first, where `known` is true
    taps          of `taps_of`
    place         the first rows, counted likewise
    """
    rows, columns, length = place[:, None], column[None, :], (end - start).to(tl.uint32)
    x_0 = _row(x_ptr, x_row, rows, start, length, columns)
    x_1 = _row(x_ptr, x_row, rows + 1, start, length, columns)
    x_2 = _row(x_ptr, x_row, rows + 2, start, length, columns)
    x_3 = _row(x_ptr, x_row, rows + 3, start, length, columns)
    before_1, before_2, before_3 = x_0, x_0, x_0
    if WIDTH > 1:
        before_1 = _row(x_ptr, x_row, rows - 1, start, length, columns)
    if WIDTH > 2:
        before_2 = _row(x_ptr, x_row, rows - 2, start, length, columns)
    if WIDTH > 3:
        before_3 = _row(x_ptr, x_row, rows - 3, start, length, columns)
    y_0 = _sum(taps, x_0, before_1, before_2, before_3, WIDTH)
    y_1 = _sum(taps, x_1, x_0, before_1, before_2, WIDTH)
    y_2 = _sum(taps, x_2, x_1, x_0, before_1, WIDTH)
    y_3 = _sum(taps, x_3, x_2, x_1, x_0, WIDTH)
    if known & (start == 0):
        y_0 = _sum_old(taps, y_0, tail_ptr, rows, columns, CHANNELS, WIDTH)
        y_1 = _sum_old(taps, y_1, tail_ptr, rows + 1, columns, CHANNELS, WIDTH)
        y_2 = _sum_old(taps, y_2, tail_ptr, rows + 2, columns, CHANNELS, WIDTH)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    return (
        silu_rounded(y_0, dtype),
        silu_rounded(y_1, dtype),
        silu_rounded(y_2, dtype),
        silu_rounded(y_3, dtype),
    )


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
