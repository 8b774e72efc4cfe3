"""Root-mean-square norms. Know nothing of layers, heads or checkpoints.

x_..D activations, D the normalised dim.
"""

import math

import torch
from torch.nn import functional as F

from kernels.all2all.base import sum_partials
from kernels.block_fp8 import Fp8Rows
from kernels.fused import fused_kernels
from kernels.lora.rows import AdapterRows
from kernels.native.dense import dense_kernels
from workers.layers.linear import Linear

Gate = tuple[torch.Tensor, torch.Tensor]


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32.

    `weight` has any shape that broadcasts against x and ends in D; fill it through `load_scale`:
    copy checkpoint values, then multiply by it. The result has x's dtype, or `out_dtype`.

    Four forms, equal up to rounding. GPUs run one Triton kernel, together with the addition before the norm. CPUs run
    one call of our C code in float32, if it was compiled. Without it, four operators take 5.5 us for 8 rows of 128,
    where `F.rms_norm` takes 11 us, because it runs six operators of 1 to 3 us each inside. Both CPU forms use
    sqrt(mean(x^2) + eps) == hypot(|x|, sqrt(D eps)) / sqrt(D), and keep the factor sqrt(D) in the weight. Devices
    without Triton run `F.rms_norm`, which is one kernel there.
    """

    __slots__ = (
        "_dim",
        "_floor",
        "_fused",
        "eps",
        "floor",
        "load_scale",
        "native",
        "triton",
        "weight",
    )

    def __init__(
        self,
        shape: tuple[int, ...],
        eps: float,
        *,
        device: torch.device,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        fused: bool | None = None,
    ):
        self._fused = device.type != "cpu" if fused is None else fused
        self._dim = shape[-1]
        self.eps = eps
        self.floor = self._dim * eps
        self._floor = torch.tensor(math.sqrt(self.floor), device=device)
        self.native = None if self._fused else dense_kernels(device.type, dtype)
        self.triton = fused_kernels(device.type) if self._fused else None
        self.load_scale = 1.0 if self._fused else math.sqrt(self._dim)
        weight_dtype = (weight_dtype or dtype) if self._fused else torch.float32
        self.weight = torch.empty(shape, dtype=weight_dtype, device=device)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the norm of x [..., D], of any floating dtype and strides, as a new contiguous tensor."""
        if self.triton is not None and x.dim() == 2 and self.weight.dim() == 1:
            return self.triton.add_rms_norm(x, None, self.weight, self.eps).to(out_dtype or x.dtype)
        if self._fused:
            return self._call_fused(x).to(out_dtype or x.dtype)
        if self.native is not None and x.dtype == torch.float32 and self.weight.dim() == 1:
            return self.native.rms_norm(x, self.weight, self.floor).to(out_dtype or x.dtype)
        x_f32 = x.float()
        length = torch.linalg.vector_norm(x_f32, dim=-1, keepdim=True).hypot_(self._floor)
        return torch.div(x_f32, length).mul_(self.weight).to(out_dtype or x.dtype)

    def add(
        self,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        out_TD: torch.Tensor | None = None,
        gate: Gate | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add delta to x in place; return x and its norm.

        delta   [T, D], or parts [P, T, D] of a sum; None: no addition
        out     receives the norm, rows maybe strided, may be x itself; None: a new contiguous tensor
        gate    a weight [D], and [T, 1] that receives the products of the norm's rows with it; on GPUs
        """
        if self.triton is not None:
            normed = self.triton.add_rms_norm(x_TD, delta_TD, self.weight, self.eps, out_TD, gate)
            return x_TD, normed
        assert gate is None, "Triton's kernel alone multiplies by a gate"
        if delta_TD is not None:
            x_TD.add_(sum_partials(delta_TD))
        return x_TD, self(x_TD) if out_TD is None else out_TD.copy_(self(x_TD))

    def add_for(
        self,
        linear: Linear,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        adapters: AdapterRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | Fp8Rows]:
        """As `add`, with the norm in the form that `linear` takes."""
        if self.triton is None or not linear.takes_fp8(x_TD, adapters):
            return self.add(x_TD, delta_TD)
        return x_TD, self.triton.add_rms_norm_fp8(x_TD, delta_TD, self.weight, self.eps)

    def add_for_both(
        self,
        linear: Linear,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        adapters: AdapterRows | None = None,
        gate: Gate | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | Fp8Rows, torch.Tensor]:
        """As `add_for`; return the norm in the dtype of x too, the same tensor if that is the form."""
        if self.triton is None or not linear.takes_fp8(x_TD, adapters):
            x_TD, normed_TD = self.add(x_TD, delta_TD, gate=gate)
            return x_TD, normed_TD, normed_TD
        plain_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        rows = self.triton.add_rms_norm_fp8(x_TD, delta_TD, self.weight, self.eps, plain_TD, gate)
        return x_TD, rows, plain_TD

    def _call_fused(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dim() == 1:
            return F.rms_norm(x, (self._dim,), self.weight, self.eps)
        return F.rms_norm(x, (self._dim,), None, self.eps).mul_(self.weight)
