"""Sums each row's local expert outputs into its owner's memory, waits for the peers' sums and adds them: one kernel.

Only ranks that hold an expert of the row send a sum. The owner adds only these sums, in the order of the ranks and in
float32. All programs wait, so all of the grid must fit on the GPU at once. See `kernels.all2all.symm`.

T rows of this rank, N = r * T of all ranks, D hidden, K experts per row, r ranks.
"""

import triton
import triton.language as tl

from kernels.triton.pdl import begin
from kernels.triton.signals import signal_ranks, wait_for_ranks


@triton.jit
def _push(
    y_ptr,
    place_ptr,
    rows_ptr,
    bases_ptr,
    num_rows,
    rank,
    sums_at,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Push this rank's sums of all rows, the next rank's rows first: no two ranks write to one rank at once."""
    columns = tl.arange(0, BLOCK)[None, :]
    weights_ptr = (rows_ptr + WEIGHTS_AT).to(tl.pointer_type(tl.float32))
    total_rows = NUM_RANKS * num_rows
    element: tl.constexpr = y_ptr.dtype.element_ty
    element_bytes: tl.constexpr = element.primitive_bitwidth // 8
    for first in range(tl.program_id(0) * ROWS, total_rows, tl.num_programs(0) * ROWS):
        step = first + tl.arange(0, ROWS)
        inside = step < total_rows
        row = (step + (rank + 1) * num_rows) % total_rows
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        hit = tl.zeros((ROWS,), tl.int32)
        for k in tl.static_range(TOP_K):
            place = tl.load(place_ptr + row * TOP_K + k, mask=inside, other=-1).to(tl.int64)
            local = place >= 0
            weight_at = row.to(tl.int64) * (ROW_BYTES // 4) + k
            weight = tl.load(weights_ptr + weight_at, mask=local, other=0)
            y_at = (place * HIDDEN)[:, None] + columns
            y = tl.load(y_ptr + y_at, mask=local[:, None] & (columns < HIDDEN), other=0)
            total += weight[:, None] * y.to(tl.float32)
            hit |= local.to(tl.int32)
        sum_at = (rank * num_rows + row % num_rows).to(tl.int64) * (HIDDEN * element_bytes)
        sum_at += tl.load(bases_ptr + row // num_rows, mask=inside, other=0) + sums_at
        out_ptr = sum_at[:, None].to(y_ptr.dtype) + columns
        if HIDDEN * element_bytes % 16 == 0:
            out_ptr = tl.multiple_of(out_ptr, (16, 16))
        sent = (hit > 0)[:, None] & (columns < HIDDEN)
        tl.store(out_ptr, total.to(element), mask=sent)


@triton.jit
def _add(
    ids_ptr,
    sums_ptr,
    starts_ptr,
    out_ptr,
    num_rows,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add the sums that the ranks of a row's experts have sent, for this rank's rows.

    ids_ptr   of this rank's own tensor: a peer may write the next rows meanwhile
    """
    columns = tl.arange(0, BLOCK)[None, :]
    choices = tl.arange(0, BLOCK_K)[None, :]
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        inside = row < num_rows
        ids = tl.load(ids_ptr + row * TOP_K + choices, mask=inside & (choices < TOP_K), other=-1)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for peer in tl.static_range(NUM_RANKS):
            local = (ids >= tl.load(starts_ptr + peer)) & (ids < tl.load(starts_ptr + peer + 1))
            sent = (tl.max(local.to(tl.int32), 1)[:, None] > 0) & (columns < HIDDEN)
            part_at = (peer * num_rows + row).to(tl.int64) * HIDDEN + columns
            total += tl.load(sums_ptr + part_at, mask=sent, other=0).to(tl.float32)
        out_at = row.to(tl.int64) * HIDDEN + columns
        tl.store(
            out_ptr + out_at,
            total.to(out_ptr.dtype.element_ty),
            mask=inside & (columns < HIDDEN),
        )


@triton.jit(do_not_specialize=["num_rows", "rank"])
def push_sums_kernel(
    y_ptr,
    place_ptr,
    ids_ptr,
    rows_ptr,
    sums_ptr,
    bases_ptr,
    starts_ptr,
    calls_ptr,
    words_ptr,
    abort_ptr,
    out_ptr,
    num_rows,
    rank,
    sums_at,
    words_at,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Push, signal, wait, add. calls_ptr int32 [2] counts sums apart from rows, so a combine may be left out."""
    begin(PDL)
    # Read before the signal, because program 0 writes it after all programs have signalled.
    call = tl.load(calls_ptr + 1) + 1
    _push(y_ptr, place_ptr, rows_ptr, bases_ptr, num_rows, rank, sums_at,
        HIDDEN, TOP_K, NUM_RANKS, ROW_BYTES, WEIGHTS_AT, ROWS, BLOCK)  # fmt: skip
    signal_ranks(bases_ptr, words_at + 4 * rank, NUM_RANKS)
    wait_for_ranks(words_ptr, call, abort_ptr, NUM_RANKS)
    tl.store(calls_ptr + 1, call, mask=tl.program_id(0) == 0)
    _add(ids_ptr, sums_ptr, starts_ptr, out_ptr, num_rows, HIDDEN,
        TOP_K, NUM_RANKS, ROWS, BLOCK, BLOCK_K)  # fmt: skip
