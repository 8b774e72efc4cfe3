"""Gives each (row, expert) pair its place in expert order: a stable counting sort on the device.

One program per chunk of pairs and local expert; each finds by itself where its expert begins, so that
a decode's few pairs take one launch. Knows nothing of what the rows hold.

N rows, K experts per row, e local experts, R places.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.count_pairs import count_pairs

CHUNKS = (256, 1024, 4096)  # pairs of one program; more pairs than the last take two launches
TAIL = 1024


@triton.jit
def _sum_counts(counts_ptr, chunk, num_chunks, BINS: tl.constexpr):
    """Each expert's pairs, in all chunks and in those before this one."""
    totals = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for first_chunk in range(0, num_chunks, 16):
        chunks = (first_chunk + tl.arange(0, 16))[:, None]
        counts_at = counts_ptr + chunks * BINS + tl.arange(0, BINS)[None, :]
        counts = tl.load(counts_at, mask=chunks < num_chunks, other=0)
        totals += tl.sum(counts, 0)
        before += tl.sum(tl.where(chunks < chunk, counts, 0), 0)
    return totals, before


@triton.jit
def _mark_empty(
    expert_ptr, end, all_taken, num_places, program, ALIGNMENT: tl.constexpr, TAIL: tl.constexpr
):
    """-1 at the places behind one expert's rows, and at this program's share of those behind all."""
    nobody = tl.full((ALIGNMENT,), -1, tl.int32)
    pads = end + tl.arange(0, ALIGNMENT)
    aligned_end = (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    tl.store(expert_ptr + pads, nobody, mask=pads < aligned_end)
    num_programs = tl.num_programs(0) * tl.num_programs(1)
    for first in range(all_taken + program * TAIL, num_places, num_programs * TAIL):
        tail = first + tl.arange(0, TAIL)
        tl.store(expert_ptr + tail, tl.full((TAIL,), -1, tl.int32), mask=tail < num_places)


@triton.jit
def place_pairs_kernel(
    ids_ptr,
    ids_stride,
    counts_ptr,
    place_ptr,
    row_ptr,
    expert_ptr,
    bounds_ptr,
    num_pairs,
    num_places,
    first_expert,
    num_chunks,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One expert's pairs of one chunk; `counts` are read where COUNTED, else made of the only chunk."""
    chunk, expert = tl.program_id(0), tl.program_id(1)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = pairs < num_pairs
    row = pairs // TOP_K
    ids_at = ids_ptr + row.to(tl.int64) * ids_stride + pairs % TOP_K
    pair_expert = tl.load(ids_at, mask=inside, other=-1).to(tl.int32) - first_expert
    local = (pair_expert >= 0) & (pair_expert < NUM_EXPERTS)
    if COUNTED:
        totals, before = _sum_counts(counts_ptr, chunk, num_chunks, BINS)
    else:
        totals = tl.histogram(tl.where(local, pair_expert, NUM_EXPERTS), BINS)
        before = tl.zeros((BINS,), tl.int32)
    experts = tl.arange(0, BINS)
    totals = tl.where(experts < NUM_EXPERTS, totals, 0)
    taken = (totals + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    start = tl.sum(tl.where(experts < expert, taken, 0))
    end = start + tl.sum(tl.where(experts == expert, totals, 0))
    mine = local & (pair_expert == expert)
    first = start + tl.sum(tl.where(experts == expert, before, 0))
    place = first + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(place_ptr + pairs, place, mask=mine)
    tl.store(row_ptr + place, row, mask=mine)
    if expert == 0:
        tl.store(place_ptr + pairs, tl.full((CHUNK,), -1, tl.int32), mask=inside & (local == 0))
    if chunk == 0:
        tl.store(bounds_ptr + expert, start)
        tl.store(bounds_ptr + NUM_EXPERTS + expert, end)
        rows = tl.sum(tl.where(experts <= expert, totals, 0))
        tl.store(bounds_ptr + 2 * NUM_EXPERTS + expert, rows)
    if ALIGNMENT > 1:
        tl.store(expert_ptr + place, tl.zeros((CHUNK,), tl.int32) + expert, mask=mine)
        program = chunk * NUM_EXPERTS + expert
        _mark_empty(expert_ptr, end, tl.sum(taken), num_places, program, ALIGNMENT, TAIL)


def place_pairs(
    topk_idx_NK: torch.Tensor, experts: range, num_places: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """place_NK, row_R, expert_R (only where alignment > 1), bounds_3e: see `kernels.device_routing`.

    topk_idx_NK int64 or int32, rows may be strided. N > 0 and e > 0. Does not wait for the device.
    """
    num_pairs, device = topk_idx_NK.numel(), topk_idx_NK.device
    assert topk_idx_NK.stride(1) == 1 and num_pairs and len(experts)
    chunk = next((size for size in CHUNKS if num_pairs <= size), CHUNKS[-1])
    num_chunks = triton.cdiv(num_pairs, chunk)
    bins = max(32, triton.next_power_of_2(len(experts) + 1))
    counts = None
    if num_chunks > 1:
        counts = count_pairs(topk_idx_NK, experts, bins=bins, chunk=chunk)
    place_NK = torch.empty(topk_idx_NK.shape, dtype=torch.int32, device=device)
    row_R = place_NK.new_empty(num_places)
    expert_R = place_NK.new_empty(num_places) if alignment > 1 else None
    bounds_3e = place_NK.new_empty(3, len(experts))
    place_pairs_kernel[(num_chunks, len(experts))](
        topk_idx_NK,
        topk_idx_NK.stride(0),
        place_NK if counts is None else counts,
        place_NK,
        row_R,
        row_R if expert_R is None else expert_R,
        bounds_3e,
        num_pairs,
        num_places,
        experts.start,
        num_chunks,
        TOP_K=topk_idx_NK.shape[1],
        NUM_EXPERTS=len(experts),
        BINS=bins,
        CHUNK=chunk,
        COUNTED=counts is not None,
        ALIGNMENT=alignment,
        TAIL=TAIL,
        num_warps=8 if chunk > CHUNKS[0] else 4,
    )
    return place_NK, row_R, expert_R, bounds_3e
