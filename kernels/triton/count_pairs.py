"""How many (row, expert) pairs of each chunk go to each local expert: what `place_pairs` needs first if they are many.

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
    """The local expert of each pair; NUM_EXPERTS where the pair is not local, or none at all."""
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
    """One chunk: counts[chunk, expert]."""
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    bins = bins_of(ids_ptr, ids_stride, pairs, num_pairs, first_expert, TOP_K, NUM_EXPERTS)
    counts = tl.histogram(bins, BINS)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), counts)


def count_pairs(
    topk_idx_NK: torch.Tensor, experts: range, *, bins: int, chunk: int
) -> torch.Tensor:
    """int32 [C + 1, bins], the last row free; column e counts the pairs that are not local, later ones are 0."""
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
