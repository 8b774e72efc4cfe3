"""The operators between matrix products on GPUs, each as one Triton kernel where torch has three to six.

For 128 rows of hidden size 2048, 36 heads of 128 and 128 experts, an H200 takes (us, torch / fused): residual add and
norm 5.0 / 2.1; norm of heads, rotary embedding and KV write 23.1 / 2.5; choice of experts 17.2 / 2.5.
Knows nothing of layers or requests.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kernels.block_fp8 import BlockWeights, Fp8Rows

Tensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class FusedKernels:
    """Functions of `kernels/triton`; see there for arguments and results."""

    add_rms_norm: Callable[..., torch.Tensor]
    add_rms_norm_fp8: Callable[..., Fp8Rows]
    norm_rotate: Callable[[torch.Tensor, torch.Tensor | None, float, torch.Tensor | None], None]
    gated_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    gated_rms_norm_fp8: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Fp8Rows]
    gated_sum: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    output_gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    output_gate_fp8: Callable[[torch.Tensor, torch.Tensor], Fp8Rows]
    route_top_k: Callable[..., Tensors]
    route_groups: Callable[..., Tensors]
    takes_skinny: Callable[[torch.Tensor, torch.Tensor | BlockWeights], bool]
    skinny_linear: Callable[..., torch.Tensor]


@functools.cache
def fused_kernels(device_type: str) -> FusedKernels | None:
    """Return the kernels, or None where they cannot run and the caller must use torch's operators."""
    if device_type != "cuda" or find_spec("triton") is None:
        return None
    from kernels.triton.gated_norm import (
        gated_rms_norm,
        gated_rms_norm_fp8,
        output_gate,
        output_gate_fp8,
    )
    from kernels.triton.gated_sum import gated_sum
    from kernels.triton.norm import add_rms_norm, add_rms_norm_fp8
    from kernels.triton.qk_rope import norm_rotate
    from kernels.triton.route import route_top_k
    from kernels.triton.route_groups import route_groups
    from kernels.triton.skinny_linear import skinny_linear, takes_skinny

    return FusedKernels(
        add_rms_norm,
        add_rms_norm_fp8,
        norm_rotate,
        gated_rms_norm,
        gated_rms_norm_fp8,
        gated_sum,
        output_gate,
        output_gate_fp8,
        route_top_k,
        route_groups,
        takes_skinny,
        skinny_linear,
    )
