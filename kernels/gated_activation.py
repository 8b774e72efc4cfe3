"""activation(gate) * up with torch's operators, on any device. I the width of gate and of up."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation

_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return a new tensor [..., I] in the dtype of gate_up [..., 2I], where gate is the first half of a row."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate = gate.clamp(max=SWIGLU_LIMIT)
        return (
            (gate * SWIGLU_ALPHA)
            .sigmoid_()
            .mul_(gate)
            .mul_(up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1))
        )
    return _FUNCTIONS[activation](gate).mul_(up)
