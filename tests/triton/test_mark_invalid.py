"""Rows without a token get a number in its place."""

import pytest
import torch

from kernels.triton.mark_invalid import BLOCK, mark_invalid
from tests.triton.device import DEVICE


@pytest.mark.parametrize("num_rows", [0, 7, BLOCK + 5])
def test_mark_invalid(num_rows: int):
    """Other rows keep their tokens, whatever their best logit is."""
    nan, inf = float("nan"), float("inf")
    kinds = torch.tensor([1.5, nan, -inf, inf, 0.0, -3e38, 3e38])
    best_B, token_B = kinds.repeat(num_rows)[:num_rows], torch.arange(num_rows)
    expected = token_B.masked_fill(~best_B.isfinite(), -1).masked_fill(best_B == -inf, -2)
    found = token_B.to(DEVICE, copy=True)
    mark_invalid(best_B.to(DEVICE), found, invalid=-1, forbidden=-2)
    assert found.tolist() == expected.tolist()
