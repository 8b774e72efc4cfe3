"""Gives each (row, expert) pair its place in expert order: a stable counting sort on the device.

One program per chunk of pairs and local expert. A decode's few pairs are one chunk and take one launch, in
which each program finds by itself where its expert begins; more are counted first.

N rows, K experts per row, e local experts, R places.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.count_pairs import count_pairs
from kernels.triton.scan_counts import scan_counts, store_bounds

# Pairs of one program, and its warps: the fastest on one H200, with 32 local experts of 128, top-8.
ALONE = ((256, 4), (512, 4), (1024, 4), (2048, 4), (4096, 8))
CHUNK, CHUNK_WARPS = 2048, 8


@triton.jit(do_not_specialize=["num_pairs"])
def place_pairs_kernel(
    ids_ptr,
    ids_stride,
    before_ptr,
    place_ptr,
    row_ptr,
    bounds_ptr,
    num_pairs,
    first_expert,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALONE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """One expert's pairs of one chunk. If ALONE it is the only chunk, and there are no counts yet."""
    chunk, expert = tl.program_id(0), tl.program_id(1)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = pairs < num_pairs
    row = pairs // TOP_K
    ids_at = ids_ptr + row.to(tl.int64) * ids_stride + pairs % TOP_K
    pair_expert = tl.load(ids_at, mask=inside, other=-1).to(tl.int32) - first_expert
    local = (pair_expert >= 0) & (pair_expert < NUM_EXPERTS)
    mine = local & (pair_expert == expert)
    if ALONE and ALIGNMENT == 1:
        first = tl.sum((local & (pair_expert < expert)).to(tl.int32))
        end = first + tl.sum(mine.to(tl.int32))
        tl.store(bounds_ptr + expert, first)
        tl.store(bounds_ptr + NUM_EXPERTS + expert, end)
        tl.store(bounds_ptr + 2 * NUM_EXPERTS + expert, end)
    elif ALONE:
        totals = tl.histogram(tl.where(local, pair_expert, NUM_EXPERTS), BINS)
        if expert == 0:
            store_bounds(bounds_ptr, totals, NUM_EXPERTS, BINS, ALIGNMENT)
        taken = (totals + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        first = tl.sum(tl.where(tl.arange(0, BINS) < expert, taken, 0))
    else:
        first = tl.load(bounds_ptr + expert) + tl.load(before_ptr + chunk * BINS + expert)
    place = first + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(place_ptr + pairs, place, mask=mine)
    tl.store(row_ptr + place, row, mask=mine)
    if expert == 0:
        tl.store(place_ptr + pairs, tl.full((CHUNK,), -1, tl.int32), mask=inside & (local == 0))


def place_pairs(
    topk_idx_NK: torch.Tensor, experts: range, num_places: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """place_NK, row_R, bounds_3e: see `kernels.device_routing`.

    topk_idx_NK int64 or int32, rows may be strided. N > 0 and e > 0. Does not wait for the device.
    """
    num_pairs, device = topk_idx_NK.numel(), topk_idx_NK.device
    assert topk_idx_NK.stride(1) == 1 and num_pairs and len(experts)
    bins = max(32, triton.next_power_of_2(len(experts) + 1))
    place_NK = torch.empty(topk_idx_NK.shape, dtype=torch.int32, device=device)
    row_R, bounds_3e = place_NK.new_empty(num_places), place_NK.new_empty(3, len(experts))
    alone = next(((size, warps) for size, warps in ALONE if num_pairs <= size), None)
    chunk, warps = alone or (CHUNK, CHUNK_WARPS)
    before = place_NK
    if not alone:
        before = count_pairs(topk_idx_NK, experts, bins=bins, chunk=chunk)
        scan_counts(before, bounds_3e, alignment)
    place_pairs_kernel[(triton.cdiv(num_pairs, chunk), len(experts))](
        topk_idx_NK,
        topk_idx_NK.stride(0),
        before,
        place_NK,
        row_R,
        bounds_3e,
        num_pairs,
        experts.start,
        TOP_K=topk_idx_NK.shape[1],
        NUM_EXPERTS=len(experts),
        BINS=bins,
        CHUNK=chunk,
        ALONE=alone is not None,
        ALIGNMENT=alignment,
        num_warps=warps,
    )
    return place_NK, row_R, bounds_3e
