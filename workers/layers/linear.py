"""Projections. Know nothing of layers or checkpoints.

T tokens, K input width, N output width.
"""

import torch
from torch.nn import functional as F

from kernels.native.dense import dense_kernels


def linear(
    x_TK: torch.Tensor, w_NK: torch.Tensor, start: torch.Tensor | None = None
) -> torch.Tensor:
    """Return start + x @ w.T, a new tensor [T, N]; start is a residual [T, N], a bias [N], or None for zeros."""
    native = dense_kernels(x_TK.device.type, x_TK.dtype)
    if native is not None and native.takes(x_TK, w_NK):
        return native.linear(x_TK, w_NK, start)
    if start is None or start.dim() == 1:
        return F.linear(x_TK, w_NK, start)
    return torch.addmm(start, x_TK, w_NK.t())
