"""Where each expert's rows begin, and each chunk's share of them, out of the counts of `count_pairs`.

e local experts, C chunks of pairs.
"""

import torch
import triton
import triton.language as tl

STEP = 64  # chunks at a time


@triton.jit
def store_bounds(
    bounds_ptr, totals, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, ALIGNMENT: tl.constexpr
):
    """Writes start, end and number of rows up to here of each expert; `totals` are the experts' rows."""
    experts = tl.arange(0, BINS)
    totals = tl.where(experts < NUM_EXPERTS, totals, 0)
    taken = (totals + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    starts = tl.cumsum(taken, 0) - taken
    inside = experts < NUM_EXPERTS
    tl.store(bounds_ptr + experts, starts, mask=inside)
    tl.store(bounds_ptr + NUM_EXPERTS + experts, starts + totals, mask=inside)
    tl.store(bounds_ptr + 2 * NUM_EXPERTS + experts, tl.cumsum(totals, 0), mask=inside)


@triton.jit(do_not_specialize=["num_chunks"])
def scan_counts_kernel(
    counts_ptr,
    bounds_ptr,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    STEP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """One program: turns counts[chunk, expert] into the sum over the chunks before, and fills `bounds`."""
    totals = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_chunks, STEP):
        chunks = (first + tl.arange(0, STEP))[:, None]
        counts_at = counts_ptr + chunks * BINS + tl.arange(0, BINS)[None, :]
        counts = tl.load(counts_at, mask=chunks < num_chunks, other=0)
        before = tl.cumsum(counts, 0) - counts + totals[None, :]
        tl.store(counts_at, before, mask=chunks < num_chunks)
        totals += tl.sum(counts, 0)
    store_bounds(bounds_ptr, totals, NUM_EXPERTS, BINS, ALIGNMENT)


def scan_counts(counts: torch.Tensor, bounds_3e: torch.Tensor, alignment: int) -> None:
    """counts int32 [C, bins] becomes the rows of earlier chunks; bounds_3e int32 is filled."""
    scan_counts_kernel[(1,)](
        counts,
        bounds_3e,
        counts.shape[0],
        NUM_EXPERTS=bounds_3e.shape[1],
        BINS=counts.shape[1],
        STEP=STEP,
        ALIGNMENT=alignment,
        num_warps=8,
    )
