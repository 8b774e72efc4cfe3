"""Gives each (row, expert) pair its place in expert order: a stable counting sort on the device.

A decode's few pairs take one launch, with a program for each local expert that finds by itself where this one begins.
More are counted first; then each program places a chunk of them: behind those of its expert in earlier chunks, and
behind the earlier ones of its own, which are compared with each other.

N rows, K experts per row, e local experts, R places.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.count_pairs import bins_of, count_pairs
from kernels.triton.scan_counts import scan_counts

# Pairs of an expert's only program, and its warps; pairs of a chunk. The fastest on one H200, with 32 local experts of
# 128, top-8.
ALONE = ((256, 4), (512, 4), (1024, 4), (2048, 4), (4096, 8))
CHUNK = 128


@triton.jit
def starts_of(totals, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where each expert's places begin; of bins that are no expert's, where all end."""
    totals = tl.where(tl.arange(0, BINS) < NUM_EXPERTS, totals, 0)
    taken = (totals + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return tl.cumsum(taken, 0) - taken


@triton.jit
def store_bounds(
    bounds_ptr, totals, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, ALIGNMENT: tl.constexpr
):
    """Writes start, end and number of rows up to here of each expert; `totals` are the experts' rows."""
    experts = tl.arange(0, BINS)
    inside = experts < NUM_EXPERTS
    totals = tl.where(inside, totals, 0)
    starts = starts_of(totals, NUM_EXPERTS, BINS, ALIGNMENT)
    tl.store(bounds_ptr + experts, starts, mask=inside)
    tl.store(bounds_ptr + NUM_EXPERTS + experts, starts + totals, mask=inside)
    tl.store(bounds_ptr + 2 * NUM_EXPERTS + experts, tl.cumsum(totals, 0), mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def place_pairs_few_kernel(
    ids_ptr,
    ids_stride,
    place_ptr,
    row_ptr,
    bounds_ptr,
    num_pairs,
    first_expert,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """One expert's pairs."""
    expert = tl.program_id(0)
    pairs = tl.arange(0, PAIRS)
    its_bin = bins_of(ids_ptr, ids_stride, pairs, num_pairs, first_expert, TOP_K, NUM_EXPERTS)
    mine = its_bin == expert
    if ALIGNMENT == 1:
        first = tl.sum((its_bin < expert).to(tl.int32))
        end = first + tl.sum(mine.to(tl.int32))
        tl.store(bounds_ptr + expert, first)
        tl.store(bounds_ptr + NUM_EXPERTS + expert, end)
        tl.store(bounds_ptr + 2 * NUM_EXPERTS + expert, end)
    else:
        totals = tl.histogram(its_bin, BINS)
        if expert == 0:
            store_bounds(bounds_ptr, totals, NUM_EXPERTS, BINS, ALIGNMENT)
        starts = starts_of(totals, NUM_EXPERTS, BINS, ALIGNMENT)
        first = tl.sum(tl.where(tl.arange(0, BINS) == expert, starts, 0))
    place = first + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(place_ptr + pairs, place, mask=mine)
    tl.store(row_ptr + place, pairs // TOP_K, mask=mine)
    if expert == 0:
        nobodys = (pairs < num_pairs) & (its_bin == NUM_EXPERTS)
        tl.store(place_ptr + pairs, tl.full((PAIRS,), -1, tl.int32), mask=nobodys)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def place_pairs_chunk_kernel(
    ids_ptr,
    ids_stride,
    before_ptr,
    place_ptr,
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
    """One chunk of pairs, of all experts; others' pairs are one more bin, whose places nobody reads."""
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
    place = tl.gather(first, its_bin, 0) + tl.sum(earlier.to(tl.int32), 1)
    tl.store(place_ptr + pairs, tl.where(local, place, -1), mask=pairs < num_pairs)
    tl.store(row_ptr + place, pairs // TOP_K, mask=local)


def place_pairs(
    topk_idx_NK: torch.Tensor, experts: range, num_places: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """permuted_idx_NK, row_R, bounds_3e: see `kernels.routing.device_routing`.

    topk_idx_NK int64 or int32, rows may be strided. N > 0 and e > 0. Does not wait for the device.
    """
    num_pairs, device = topk_idx_NK.numel(), topk_idx_NK.device
    assert topk_idx_NK.stride(1) == 1 and num_pairs and len(experts)
    bins = max(32, triton.next_power_of_2(len(experts) + 1))
    permuted_idx_NK = torch.empty(topk_idx_NK.shape, dtype=torch.int32, device=device)
    row_R, bounds_3e = (
        permuted_idx_NK.new_empty(num_places),
        permuted_idx_NK.new_empty(3, len(experts)),
    )
    ids = topk_idx_NK, topk_idx_NK.stride(0)
    sizes = {"TOP_K": topk_idx_NK.shape[1], "NUM_EXPERTS": len(experts), "BINS": bins}
    for pairs, warps in ALONE:
        if num_pairs <= pairs:
            place_pairs_few_kernel[(len(experts),)](
                *(*ids, permuted_idx_NK, row_R, bounds_3e, num_pairs, experts.start),
                **sizes,
                PAIRS=pairs,
                ALIGNMENT=alignment,
                num_warps=warps,
            )
            return permuted_idx_NK, row_R, bounds_3e
    before = count_pairs(topk_idx_NK, experts, bins=bins, chunk=CHUNK)
    scan_counts(before)
    num_chunks = triton.cdiv(num_pairs, CHUNK)
    place_pairs_chunk_kernel[(num_chunks,)](
        *(*ids, before, permuted_idx_NK, row_R, bounds_3e, num_pairs, num_chunks, experts.start),
        **sizes,
        CHUNK=CHUNK,
        ALIGNMENT=alignment,
        num_warps=4,
    )
    return permuted_idx_NK, row_R, bounds_3e
