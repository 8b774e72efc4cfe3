"""Writes each row into the memory of the ranks that hold any of its experts, and waits for the peers' rows: one kernel.

A row has an equal place on all ranks, so nothing is counted before. A rank that holds none of a row's experts gets
only the ids and weights, and the row's x is undefined there. With FP8 rows are quantised on their way. See
`kernels.all2all.symm` and `kernels.all2all.payload`.

T rows of this rank, D hidden, K experts per row, r ranks.
"""

import triton
import triton.language as tl

from kernels.triton.fp8 import GROUP, quantise
from kernels.triton.pdl import begin
from kernels.triton.signals import signal_ranks, wait_for_ranks

FP8_GROUP = tl.constexpr(GROUP)


@triton.jit
def _quantise(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK] -> e4m3 of the same shape, float32 scales [ROWS, BLOCK / 128]."""
    groups = tl.reshape(x.to(tl.float32), (ROWS * (BLOCK // FP8_GROUP), FP8_GROUP))
    values, scales = quantise(groups)
    return tl.reshape(values, (ROWS, BLOCK)), tl.reshape(scales, (ROWS, BLOCK // FP8_GROUP))


@triton.jit
def _store_scales(scales, row_at, wanted, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Store the scales of rows behind their values."""
    groups = tl.arange(0, BLOCK // FP8_GROUP)[None, :]
    scales_at = (row_at + HIDDEN).to(tl.pointer_type(tl.float32)) + groups
    tl.store(scales_at, scales, mask=wanted & (groups < HIDDEN // FP8_GROUP))


@triton.jit
def _holds(ids, starts_ptr, peer):
    """Return whether a rank holds any expert of each row: [ROWS, 1]."""
    local = (ids >= tl.load(starts_ptr + peer)) & (ids < tl.load(starts_ptr + peer + 1))
    return tl.max(local.to(tl.int32), 1)[:, None] > 0


@triton.jit
def send_rows(
    x,
    ids,
    weights,
    row,
    here,
    chosen,
    bases_ptr,
    starts_ptr,
    num_rows,
    rank,
    rows_at,
    HIDDEN: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
):
    """Store rows x [ROWS, BLOCK] at their places, [ROWS, 1], on the ranks of their experts; the next rank first.

    here, chosen   what is stored of x, and of ids and weights [ROWS, BLOCK_K]
    """
    columns, choices = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK_K)[None, :]
    element = tl.pointer_type(tl.float8e4nv) if FP8 else tl.pointer_type(x.dtype)
    if FP8:
        x, scales = _quantise(x, ROWS, BLOCK)
    for step in tl.static_range(1, NUM_RANKS + 1):
        peer = (rank + step) % NUM_RANKS
        row_at = rows_at + (rank * num_rows + row).to(tl.int64) * ROW_BYTES
        row_at += tl.load(bases_ptr + peer)
        ids_out = (row_at + IDS_AT).to(tl.pointer_type(tl.int32)) + choices
        tl.store(ids_out, ids, mask=chosen)
        weights_out = (row_at + WEIGHTS_AT).to(tl.pointer_type(tl.float32))
        tl.store(weights_out + choices, weights, mask=chosen)
        wanted = _holds(ids, starts_ptr, peer)
        x_out = tl.multiple_of(row_at.to(element) + columns, (16, 16))
        tl.store(x_out, x, mask=here & wanted)
        if FP8:
            _store_scales(scales, row_at, (row < num_rows) & wanted, HIDDEN, BLOCK)


@triton.jit(do_not_specialize=["num_rows", "rank"])
def push_rows_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,
    bases_ptr,
    starts_ptr,
    calls_ptr,
    words_ptr,
    abort_ptr,
    num_rows,
    rank,
    rows_at,
    words_at,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Push ROWS rows at a time; program 0 returns when the rows of all ranks have arrived.

    calls_ptr   int32 [2], calls of this kernel and of push_sums_kernel
    """
    begin(PDL)
    program = tl.program_id(0)
    # Read before the barrier of the signal: a late warp would read the value that another warp stores below.
    call = tl.load(calls_ptr) + 1
    columns, choices = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK_K)[None, :]
    for first in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        inside = row < num_rows
        chosen, here = inside & (choices < TOP_K), inside & (columns < HIDDEN)
        pair = row * TOP_K + choices
        ids = tl.load(ids_ptr + pair, mask=chosen, other=-1).to(tl.int32)
        weights = tl.load(weights_ptr + pair, mask=chosen, other=0)
        x = tl.load(x_ptr + row.to(tl.int64) * HIDDEN + columns, mask=here, other=0)
        send_rows(x, ids, weights, row, here, chosen, bases_ptr, starts_ptr, num_rows, rank,
            rows_at, HIDDEN, NUM_RANKS, ROW_BYTES, IDS_AT, WEIGHTS_AT, ROWS, BLOCK, BLOCK_K, FP8)  # fmt: skip
    signal_ranks(bases_ptr, words_at + 4 * rank, NUM_RANKS)
    if program == 0:
        wait_for_ranks(words_ptr, call, abort_ptr, NUM_RANKS)
        tl.store(calls_ptr, call)
