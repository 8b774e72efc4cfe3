"""Counts of the (row, expert) pairs of each chunk by local expert, which `permute_pairs` needs for many pairs.

N rows, K experts per row, e local experts, C chunks of pairs.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def bins_of(
    ids_ptr,
    ids_stride,
    pairs,
    num_pairs,
    first_expert,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
):
    """Return the local expert of each pair; NUM_EXPERTS for a pair without a local expert and beyond the last pair."""
    row = (pairs // TOP_K).to(tl.int64)
    ids_at = ids_ptr + row * ids_stride + pairs % TOP_K
    expert = tl.load(ids_at, mask=pairs < num_pairs, other=-1).to(tl.int32) - first_expert
    return tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(
    ids_ptr,
    ids_stride,
    counts_ptr,
    num_pairs,
    first_expert,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count the pairs of one chunk: counts[chunk, expert]."""
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    bins = bins_of(ids_ptr, ids_stride, pairs, num_pairs, first_expert, TOP_K, NUM_EXPERTS)
    counts = tl.histogram(bins, BINS)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), counts)


def count_pairs(
    topk_idx_NK: torch.Tensor, experts: range, *, bins: int, chunk: int
) -> torch.Tensor:
    """Return counts int32 [C + 1, bins] with the last row free.

    Column e counts the pairs without a local expert; later columns are 0.
    """
    num_pairs = topk_idx_NK.numel()
    num_chunks = triton.cdiv(num_pairs, chunk)
    counts = torch.empty(num_chunks + 1, bins, dtype=torch.int32, device=topk_idx_NK.device)
    count_pairs_kernel[(num_chunks,)](
        topk_idx_NK,
        topk_idx_NK.stride(0),
        counts,
        num_pairs,
        experts.start,
        TOP_K=topk_idx_NK.shape[1],
        NUM_EXPERTS=len(experts),
        BINS=bins,
        CHUNK=chunk,
        num_warps=4,
    )
    return counts
