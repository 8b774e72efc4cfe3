"""The permuted row of each (row, expert) pair in expert order: a stable counting sort on the device.

A decode's few pairs take one launch, with a program for each local expert that computes the expert's first row itself.
Further programs of the launch can quantise the rows.
Many pairs are counted first. Then each program permutes a chunk of pairs: a pair goes behind the pairs of its expert in
earlier chunks and behind the earlier pairs of its expert in the chunk, which the program compares with each other.

N rows, D hidden, K experts per row, e local experts, R permuted rows.
"""

import torch
import triton
import triton.language as tl

from kernels.block_fp8 import Fp8Rows
from kernels.triton.count_pairs import bins_of, count_pairs
from kernels.triton.fp8 import GROUP
from kernels.triton.pdl import begin, dependent_launch
from kernels.triton.quantise_rows import parts_of_row, quantise_part
from kernels.triton.scan_counts import scan_counts

# Pairs and warps of the one program of an expert; pairs of a chunk. The fastest on one H200 with 32 local experts of
# 128, top-8.
ALONE = ((256, 4), (512, 4), (1024, 4), (2048, 4), (4096, 8))
CHUNK = 128


@triton.jit
def starts_of(totals, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return the first permuted row of each expert; the end of all rows for a bin without an expert."""
    totals = tl.where(tl.arange(0, BINS) < NUM_EXPERTS, totals, 0)
    taken = (totals + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return tl.cumsum(taken, 0) - taken


@triton.jit
def store_bounds(
    bounds_ptr, totals, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, ALIGNMENT: tl.constexpr
):
    """Store start, end and cumulative number of rows of each expert; `totals` are the rows of each."""
    experts = tl.arange(0, BINS)
    inside = experts < NUM_EXPERTS
    totals = tl.where(inside, totals, 0)
    starts = starts_of(totals, NUM_EXPERTS, BINS, ALIGNMENT)
    tl.store(bounds_ptr + experts, starts, mask=inside)
    tl.store(bounds_ptr + NUM_EXPERTS + experts, starts + totals, mask=inside)
    tl.store(bounds_ptr + 2 * NUM_EXPERTS + experts, tl.cumsum(totals, 0), mask=inside)


@triton.jit
def permute_pairs_few(
    ids_ptr,
    ids_stride,
    permuted_ptr,
    row_ptr,
    bounds_ptr,
    num_pairs,
    first_expert,
    expert,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Permute the pairs of one expert."""
    pairs = tl.arange(0, PAIRS)
    its_bin = bins_of(ids_ptr, ids_stride, pairs, num_pairs, first_expert, TOP_K, NUM_EXPERTS)
    its_own = its_bin == expert
    if ALIGNMENT == 1:
        first = tl.sum((its_bin < expert).to(tl.int32))
        end = first + tl.sum(its_own.to(tl.int32))
        tl.store(bounds_ptr + expert, first)
        tl.store(bounds_ptr + NUM_EXPERTS + expert, end)
        tl.store(bounds_ptr + 2 * NUM_EXPERTS + expert, end)
    else:
        totals = tl.histogram(its_bin, BINS)
        if expert == 0:
            store_bounds(bounds_ptr, totals, NUM_EXPERTS, BINS, ALIGNMENT)
        starts = starts_of(totals, NUM_EXPERTS, BINS, ALIGNMENT)
        first = tl.sum(tl.where(tl.arange(0, BINS) == expert, starts, 0))
    permuted = first + tl.cumsum(its_own.to(tl.int32), 0) - 1
    tl.store(permuted_ptr + pairs, permuted, mask=its_own)
    tl.store(row_ptr + permuted, pairs // TOP_K, mask=its_own)
    if expert == 0:
        not_local = (pairs < num_pairs) & (its_bin == NUM_EXPERTS)
        tl.store(permuted_ptr + pairs, tl.full((PAIRS,), -1, tl.int32), mask=not_local)


@triton.jit(do_not_specialize=["num_pairs", "scale_stride"])
def permute_pairs_few_kernel(
    ids_ptr,
    ids_stride,
    permuted_ptr,
    row_ptr,
    bounds_ptr,
    num_pairs,
    first_expert,
    x_ptr,
    x_stride,
    values_ptr,
    scale_ptr,
    scale_stride,
    num_groups,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Permute the pairs of one expert, or, FP8, quantise a part of a row."""
    begin(PDL)
    program = tl.program_id(0)
    if program < NUM_EXPERTS:
        permute_pairs_few(
            *(ids_ptr, ids_stride, permuted_ptr, row_ptr, bounds_ptr, num_pairs, first_expert),
            *(program, TOP_K, NUM_EXPERTS, BINS, PAIRS, ALIGNMENT),
        )
    elif FP8:
        part, parts = program - NUM_EXPERTS, tl.cdiv(num_groups, BLOCK_S)
        rows = (x_ptr, x_stride, values_ptr, scale_ptr, scale_stride, num_groups)
        quantise_part(*rows, part // parts, part % parts, BLOCK_S, GROUP)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def permute_pairs_chunk_kernel(
    ids_ptr,
    ids_stride,
    before_ptr,
    permuted_ptr,
    row_ptr,
    bounds_ptr,
    num_pairs,
    num_chunks,
    first_expert,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Permute one chunk of pairs of all experts. Pairs without a local expert are one more bin, which is never read."""
    chunk = tl.program_id(0)
    bins, within = tl.arange(0, BINS), tl.arange(0, CHUNK)
    pairs = chunk * CHUNK + within
    its_bin = bins_of(ids_ptr, ids_stride, pairs, num_pairs, first_expert, TOP_K, NUM_EXPERTS)
    local = its_bin < NUM_EXPERTS
    totals = tl.load(before_ptr + num_chunks * BINS + bins)
    if chunk == 0:
        store_bounds(bounds_ptr, totals, NUM_EXPERTS, BINS, ALIGNMENT)
    first = starts_of(totals, NUM_EXPERTS, BINS, ALIGNMENT)
    first += tl.load(before_ptr + chunk * BINS + bins)
    earlier = (its_bin[:, None] == its_bin[None, :]) & (within[:, None] > within[None, :])
    permuted = tl.gather(first, its_bin, 0) + tl.sum(earlier.to(tl.int32), 1)
    tl.store(permuted_ptr + pairs, tl.where(local, permuted, -1), mask=pairs < num_pairs)
    tl.store(row_ptr + permuted, pairs // TOP_K, mask=local)


def quantises(num_pairs: int) -> bool:
    """Return whether `permute_pairs` can quantise the rows of so many pairs."""
    return 0 < num_pairs <= ALONE[-1][0]


def permute_pairs(
    topk_idx_NK: torch.Tensor,
    experts: range,
    num_permuted: int,
    alignment: int,
    rows: tuple[torch.Tensor, Fp8Rows] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return permuted_idx_NK, row_R and bounds_3e of a DeviceRouting. Does not wait for the device.

    topk_idx_NK   int64 or int32, rows may be strided; N > 0 and e > 0
    rows          x_ND and the FP8 rows to fill from it, where `quantises`
    """
    num_pairs, device = topk_idx_NK.numel(), topk_idx_NK.device
    assert topk_idx_NK.stride(1) == 1 and num_pairs and len(experts)
    bins = max(32, triton.next_power_of_2(len(experts) + 1))
    permuted_idx_NK = torch.empty(topk_idx_NK.shape, dtype=torch.int32, device=device)
    row_R, bounds_3e = (
        permuted_idx_NK.new_empty(num_permuted),
        permuted_idx_NK.new_empty(3, len(experts)),
    )
    ids = topk_idx_NK, topk_idx_NK.stride(0)
    sizes = {"TOP_K": topk_idx_NK.shape[1], "NUM_EXPERTS": len(experts), "BINS": bins}
    assert rows is None or quantises(num_pairs), num_pairs
    for pairs, warps in ALONE:
        if num_pairs <= pairs:
            x, found = rows or (ids[0], Fp8Rows(ids[0], ids[0]))
            parts, block = parts_of_row(x.shape[1]) if rows else (0, 1)
            permute_pairs_few_kernel[(len(experts) + parts * len(x),)](
                *(*ids, permuted_idx_NK, row_R, bounds_3e, num_pairs, experts.start),
                *(x, x.stride(0), *found, found.scales.stride(1), x.shape[1] // GROUP),
                **sizes,
                PAIRS=pairs,
                ALIGNMENT=alignment,
                FP8=rows is not None,
                BLOCK_S=block,
                GROUP=GROUP,
                **dependent_launch(pairs // 8),  # of usual rows
                num_warps=warps,
            )
            return permuted_idx_NK, row_R, bounds_3e
    before = count_pairs(topk_idx_NK, experts, bins=bins, chunk=CHUNK)
    scan_counts(before)
    num_chunks = triton.cdiv(num_pairs, CHUNK)
    permute_pairs_chunk_kernel[(num_chunks,)](
        *(*ids, before, permuted_idx_NK, row_R, bounds_3e, num_pairs, num_chunks, experts.start),
        **sizes,
        CHUNK=CHUNK,
        ALIGNMENT=alignment,
        num_warps=4,
    )
    return permuted_idx_NK, row_R, bounds_3e
