"""Triton kernel that reads tokens out of pages of latents in e4m3 (MLA) to contiguous rows in bfloat16.

L tokens, C values of a latent, r of a rotated key, W = C + r.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.triton.fp8_heads import power_of_two


@triton.jit
def read_latents_kernel(
    values_ptr,
    keys_ptr,
    exponents_ptr,
    slots_ptr,
    out_ptr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    column, value = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    values = tl.load(values_ptr + slot * RANK + column, mask=column < RANK, other=0.0)
    keys = tl.load(keys_ptr + slot * ROPE_DIM + value, mask=value < ROPE_DIM, other=0.0)
    wide = values.to(tl.float32) * power_of_two(tl.load(exponents_ptr + slot).to(tl.int32))
    row_ptr = out_ptr + token * (RANK + ROPE_DIM)
    tl.store(row_ptr + column, wide.to(out_ptr.dtype.element_ty), mask=column < RANK)
    tl.store(row_ptr + RANK + value, keys, mask=value < ROPE_DIM)


def read_latents(caches: Sequence[torch.Tensor], slots_L: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [L, W]: the latents of these slots, then their rotated keys.

    caches   latents float8_e4m3fn [num_blocks, block_size, C], rotated keys bfloat16 [num_blocks, block_size, r],
             exponents uint8 [num_blocks, block_size], contiguous
    slots    int64
    """
    values, keys, exponents = caches
    rank, rope_dim = values.shape[2], keys.shape[2]
    out_LW = keys.new_empty(len(slots_L), rank + rope_dim)
    if len(slots_L):
        read_latents_kernel[(len(slots_L),)](
            *(values, keys, exponents, slots_L, out_LW),
            RANK=rank,
            ROPE_DIM=rope_dim,
            BLOCK_RANK=triton.next_power_of_2(rank),
            BLOCK_ROPE=triton.next_power_of_2(rope_dim),
            num_warps=2,
        )
    return out_LW
