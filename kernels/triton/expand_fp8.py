"""Triton kernel that writes K and V of whole sequences out of pages in e4m3 to contiguous rows.

P pages of all sequences, R rows, h KV heads, d head dim.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.triton.fp8_heads import power_of_two


@triton.jit
def _widen(values_ptr, exponents_ptr, out_ptr, at, exponent_at, to, inside, mask):
    values = tl.load(values_ptr + at, mask=mask, other=0.0).to(tl.float32)
    exponent = tl.load(exponents_ptr + exponent_at, mask=inside, other=127).to(tl.int32)
    wide = values * power_of_two(exponent)[:, None]
    tl.store(out_ptr + to, wide.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pages_ptr", "first_ptr", "end_ptr"])
def expand_fp8_kernel(
    k_ptr,
    v_ptr,
    k_exponents_ptr,
    v_exponents_ptr,
    pages_ptr,
    first_ptr,
    end_ptr,
    k_out_ptr,
    v_out_ptr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one page."""
    page, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(first_ptr + page), tl.load(end_ptr + page)
    if first >= end:
        return
    block = tl.load(pages_ptr + page).to(tl.int64)
    token, dim = tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    inside = (token < BLOCK_SIZE) & (first + token < end)
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    at = ((block * BLOCK_SIZE + token) * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    exponent_at = (block * NUM_HEADS + head) * BLOCK_SIZE + token
    row = (first + token).to(tl.int64)
    to = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    _widen(k_ptr, k_exponents_ptr, k_out_ptr, at, exponent_at, to, inside, mask)
    _widen(v_ptr, v_exponents_ptr, v_out_ptr, at, exponent_at, to, inside, mask)


def expand_fp8(
    tensors: Sequence[torch.Tensor],
    pages: torch.Tensor,
    firsts: torch.Tensor,
    ends: torch.Tensor,
    k_Rhd: torch.Tensor,
    v_Rhd: torch.Tensor,
) -> None:
    """Write the tokens of pages to rows of k and v.

    tensors        K, V [num_blocks, block_size, h, d] in float8_e4m3fn, their exponents [num_blocks, h, block_size]
    pages          int32 [>= P]
    firsts, ends   int32 [P]: row of a page's first token, and the row behind its sequence; equal: nothing is written
    k, v           contiguous
    """
    k_cache, v_cache, k_exponents, v_exponents = tensors
    _, block_size, num_heads, head_dim = k_cache.shape
    assert k_Rhd.is_contiguous() and v_Rhd.is_contiguous() and len(pages) >= len(firsts)
    tokens, block = triton.next_power_of_2(block_size), triton.next_power_of_2(head_dim)
    if len(firsts):
        expand_fp8_kernel[(len(firsts), num_heads)](
            *(k_cache, v_cache, k_exponents, v_exponents, pages, firsts, ends, k_Rhd, v_Rhd),
            BLOCK_SIZE=block_size,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            TOKENS=tokens,
            BLOCK=block,
            num_warps=max(1, min(8, tokens * block // 1024)),
        )
