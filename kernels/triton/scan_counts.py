"""The number of pairs of each expert before each chunk, from the counts of `count_pairs`.

e local experts, C chunks of pairs.
"""

import torch
import triton
import triton.language as tl

STEP, COLUMNS = 1024, 8  # chunks at a time, and experts of a program


@triton.jit(do_not_specialize=["num_chunks"])
def scan_counts_kernel(
    counts_ptr, num_chunks, BINS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr
):
    """Scan a few columns: each count becomes the sum of the counts above it; the last row becomes the total."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    totals = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, num_chunks, STEP):
        chunks = (first + tl.arange(0, STEP))[:, None]
        counts_at = counts_ptr + chunks * BINS + columns[None, :]
        counts = tl.load(counts_at, mask=chunks < num_chunks, other=0)
        before = tl.cumsum(counts, 0) - counts + totals[None, :]
        tl.store(counts_at, before, mask=chunks < num_chunks)
        totals += tl.sum(counts, 0)
    tl.store(counts_ptr + num_chunks * BINS + columns, totals)


def scan_counts(counts: torch.Tensor) -> None:
    """Replace counts int32 [C + 1, bins] by the pairs of all earlier chunks; the last row gets the totals."""
    bins = counts.shape[1]
    scan_counts_kernel[(triton.cdiv(bins, COLUMNS),)](
        counts, counts.shape[0] - 1, BINS=bins, STEP=STEP, COLUMNS=COLUMNS, num_warps=8
    )
