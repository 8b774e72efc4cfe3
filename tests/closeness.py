"""How far a result is from what was expected."""

from collections.abc import Mapping

import torch


def calc_diff(found: torch.Tensor, expected: torch.Tensor) -> float:
    """1 - 2 xy / (xx + yy) in double: 0 for equal ones and for two zeros, 2 for opposite ones.

    Small errors count as their squares, relative to both. DeepGEMM's and DeepEP's own tests go by it.
    """
    x, y = found.double(), expected.double()
    squares = (x * x + y * y).sum()
    return float(1 - 2 * (x * y).sum() / squares) if squares else 0.0


def assert_near(
    found: torch.Tensor, expected_f32: torch.Tensor, tolerances: Mapping[torch.dtype, float]
) -> None:
    """Within what `found`'s dtype is allowed, absolute and relative."""
    tolerance = tolerances[found.dtype]
    torch.testing.assert_close(found.float(), expected_f32, atol=tolerance, rtol=tolerance)
