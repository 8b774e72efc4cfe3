"""Triton kernel that makes heads of K out of expanded latents (MLA): each head's own values, then the shared key.

L keys, H heads, n and r unrotated and rotated values of a head of K, d = n + r, v values of a head of V, u = n + v.
"""

import torch
import triton
import triton.language as tl

HEADS_PER_PROGRAM = 16


@triton.jit
def _expand_keys(
    kv_ptr,
    rope_ptr,
    rope_row,
    k_ptr,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    head_dim: tl.constexpr = NOPE_DIM + ROPE_DIM
    kv_row = (token * NUM_HEADS + head) * (NOPE_DIM + VALUE_DIM)
    of_head = (head < NUM_HEADS) & (column < NOPE_DIM)
    own = tl.load(kv_ptr + kv_row + column, mask=of_head, other=0.0)
    of_all = (column >= NOPE_DIM) & (column < head_dim)
    shared = tl.load(rope_ptr + token * rope_row + column - NOPE_DIM, mask=of_all, other=0.0)
    key = tl.where(column < NOPE_DIM, own, shared)
    at = k_ptr + (token * NUM_HEADS + head) * head_dim + column
    tl.store(at, key, mask=(head < NUM_HEADS) & (column < head_dim))


def expand_keys(kv_LHu: torch.Tensor, rope_Lr: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """Return K [L, H, d]: the first n values of each head of kv, then the rotated key that all heads share.

    kv     [L, H, u], contiguous
    rope   [L, r], any stride between rows
    """
    num_keys, num_heads, _ = kv_LHu.shape
    rope_dim = rope_Lr.shape[1]
    assert kv_LHu.is_contiguous() and rope_Lr.stride(1) == 1 and len(rope_Lr) == num_keys
    head_dim = nope_dim + rope_dim
    k_LHd = torch.empty(num_keys, num_heads, head_dim, dtype=kv_LHu.dtype, device=kv_LHu.device)
    if num_keys:
        heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
        _expand_keys[(num_keys, triton.cdiv(num_heads, heads))](
            kv_LHu,
            rope_Lr,
            rope_Lr.stride(0),
            k_LHd,
            NUM_HEADS=num_heads,
            NOPE_DIM=nope_dim,
            ROPE_DIM=rope_dim,
            VALUE_DIM=kv_LHu.shape[2] - nope_dim,
            HEADS=heads,
            BLOCK=triton.next_power_of_2(head_dim),
            num_warps=4,
        )
    return k_LHd
