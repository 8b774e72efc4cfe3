"""Projections, with weights in the model's dtype or in FP8. Know nothing of layers or checkpoints.

T tokens, K input width, N output width, I width of gate and of up.
"""

import torch
from torch.nn import functional as F

from kernels import dense_fp8
from kernels.activation import Activation
from kernels.block_fp8 import BlockWeights, Fp8Rows
from kernels.fused import fused_kernels
from kernels.gated_activation import gated_activation
from kernels.native.dense import dense_kernels

Weight = torch.Tensor | BlockWeights


def linear(
    x_TK: torch.Tensor | Fp8Rows,
    w_NK: Weight,
    start: torch.Tensor | None = None,
    *,
    partial: bool = False,
) -> torch.Tensor:
    """Return start + x @ w.T, a new tensor [T, N]; start is a residual [T, N], a bias [N], or None for zeros.

    Rows are in FP8 only where the weights are; others are quantised for FP8 weights.
    partial   without start, allow partial sums [P, T, N] for `sum_partials`
    """
    if isinstance(x_TK, torch.Tensor) and x_TK.is_cuda:
        fused = fused_kernels("cuda")
        if fused is not None and fused.takes_thin(x_TK, w_NK):
            return fused.thin_linear(x_TK, w_NK, start)
    if isinstance(w_NK, BlockWeights):
        rows = x_TK if isinstance(x_TK, Fp8Rows) else dense_fp8.quantise(x_TK)
        out_TN = dense_fp8.multiply(rows, w_NK, partial=partial and start is None)
        return out_TN if start is None else out_TN.add_(start)
    assert isinstance(x_TK, torch.Tensor), "the weights are not in FP8"
    native = dense_kernels(x_TK.device.type, x_TK.dtype)
    if native is not None and native.takes(x_TK, w_NK):
        return native.linear(x_TK, w_NK, start)
    if start is None or start.dim() == 1:
        return F.linear(x_TK, w_NK, start)
    return torch.addmm(start, x_TK, w_NK.t())


def takes_fp8(x_TK: torch.Tensor, w_NK: Weight) -> bool:
    """Return whether `linear` quantises these rows, so that the kernel before may write them in FP8."""
    fused = fused_kernels(x_TK.device.type)
    if fused is None or not isinstance(w_NK, BlockWeights):
        return False
    return not fused.takes_thin(x_TK, w_NK)


def activated(
    gate_up_T2I: torch.Tensor, activation: Activation, w_NI: Weight
) -> torch.Tensor | Fp8Rows:
    """Return activation(gate) * up in the form that `linear` with these weights takes."""
    if isinstance(w_NI, BlockWeights):
        return dense_fp8.activate(gate_up_T2I, activation)
    return gated_activation(gate_up_T2I, activation)
