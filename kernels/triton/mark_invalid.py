"""Triton kernel that writes numbers in place of tokens to rows of which no token can be drawn.

B rows.
"""

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit(do_not_specialize=["num_rows", "invalid", "forbidden"])
def _mark_invalid(best_ptr, token_ptr, num_rows, invalid, forbidden, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    best = tl.load(best_ptr + row, mask=mask, other=0.0)
    finite = tl.abs(best) < float("inf")  # false for NaN
    number = tl.where(best == float("-inf"), forbidden, invalid)
    tl.store(token_ptr + row, number.to(tl.int64), mask=mask & (finite == 0))


def mark_invalid(
    best_B: torch.Tensor, token_B: torch.Tensor, *, invalid: int, forbidden: int
) -> None:
    """Write `forbidden` to tokens of rows of which all logits are -inf, `invalid` to those with a NaN or +inf.

    best_B    float32, the largest logit of each row; NaN where a logit is NaN
    token_B   int64, written
    """
    num_rows = len(token_B)
    assert best_B.is_contiguous() and token_B.is_contiguous()
    if num_rows:
        grid = (triton.cdiv(num_rows, BLOCK),)
        _mark_invalid[grid](best_B, token_B, num_rows, invalid, forbidden, BLOCK=BLOCK, num_warps=4)
