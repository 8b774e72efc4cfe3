"""Triton kernel that merges attention over two sets of keys by the log-sum-exps of their scores.

T tokens, H heads, v values of a head of the output.
"""

import torch
import triton
import triton.language as tl

HEADS_PER_PROGRAM, VALUES = 16, 4096  # at most, of a program


@triton.jit
def _merge_attention(
    o_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row = token * NUM_HEADS + head
    lse = tl.load(lse_ptr + row, mask=head < NUM_HEADS, other=0.0)
    other_lse = tl.load(other_lse_ptr + row, mask=head < NUM_HEADS, other=0.0)
    top = tl.maximum(lse, other_lse)
    floor = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    weight, other_weight = tl.exp2(lse - floor), tl.exp2(other_lse - floor)
    total = weight + other_weight
    scale = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    column = tl.arange(0, BLOCK)[None, :]
    at = row[:, None] * WIDTH + column
    mask = (head[:, None] < NUM_HEADS) & (column < WIDTH)
    o = tl.load(o_ptr + at, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_ptr + at, mask=mask, other=0.0).to(tl.float32)
    merged = o * (weight * scale)[:, None] + other * (other_weight * scale)[:, None]
    tl.store(o_ptr + at, merged.to(o_ptr.dtype.element_ty), mask=mask)
    merged_lse = tl.where(total > 0, floor + tl.log2(tl.where(total > 0, total, 1.0)), top)
    tl.store(lse_ptr + row, merged_lse, mask=head < NUM_HEADS)


def merge_attention(
    o_THv: torch.Tensor, lse_TH: torch.Tensor, other_THv: torch.Tensor, other_lse_TH: torch.Tensor
) -> None:
    """Merge the attention of the same queries over other keys into o and lse, in place. All are contiguous.

    lse   float32 [T, H], base 2; -inf: no keys
    """
    num_rows, num_heads, width = o_THv.shape
    assert all(x.is_contiguous() for x in (o_THv, lse_TH, other_THv, other_lse_TH))
    assert other_THv.shape == o_THv.shape and lse_TH.shape == other_lse_TH.shape
    if num_rows:
        block = triton.next_power_of_2(width)
        heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads), VALUES // block)
        _merge_attention[(num_rows, triton.cdiv(num_heads, heads))](
            o_THv,
            lse_TH,
            other_THv,
            other_lse_TH,
            NUM_HEADS=num_heads,
            WIDTH=width,
            HEADS=heads,
            BLOCK=block,
            num_warps=4,
        )
