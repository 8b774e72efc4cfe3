"""Several programs share the depth of one tile of a product, where there are fewer tiles than programs that fit.

Each program stores its float32 sums and counts itself on the counter of the tile. The program that counts last adds the
sums in the order of the parts, whichever that program is, so that equal inputs give equal bits.

R permuted rows, W weight rows of an expert.
"""

import torch
import triton
import triton.language as tl

# Counters of tiles, and parts of a tile, that there can be.
MOST_TILES = 2**14
MOST_PARTS = tl.constexpr(4)


def new_counters(device: torch.device | str) -> torch.Tensor:
    """Return zeros, int32 [MOST_TILES]. Kernels leave them 0; at most one kernel uses them at a time.

    They are made before a graph is captured, which would hold neither their place nor their zeros.
    """
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def new_sums(parts: int, num_permuted: int, weight_rows: int, device: torch.device) -> torch.Tensor:
    """Return room for the sums of all parts, float32 [parts, R, W], uninitialised."""
    return torch.empty(parts, num_permuted, weight_rows, dtype=torch.float32, device=device)


@triton.jit
def part_of(part, parts, num_blocks, UNROLL: tl.constexpr):
    """Return the first block of a part and its end; whole rounds of UNROLL blocks but for the last part."""
    rounds = tl.cdiv(num_blocks, UNROLL)
    first = part * rounds // parts * UNROLL
    end = tl.minimum((part + 1) * rounds // parts * UNROLL, num_blocks)
    return first, end


@triton.jit
def is_last(counter_ptr, parts):
    """Return whether all other parts of the tile are stored, in one program of the tile; that resets the counter."""
    # The stores of all threads come before the count of the one thread that counts.
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == parts - 1
    tl.store(counter_ptr, 0, mask=last)
    return last


@triton.jit
def add_parts(sums_at, part_stride, parts, inside):
    """Return the sums of all parts, in their order; sums_at are the places of part 0. Read where all SMs see them."""
    total = tl.zeros(sums_at.shape, tl.float32)
    for part in tl.static_range(MOST_PARTS):
        here = inside & (part < parts)
        total += tl.load(sums_at + part * part_stride, mask=here, other=0, cache_modifier=".cg")
    return total
