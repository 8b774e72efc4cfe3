"""Dense gated MLPs: the one of a layer without experts, and the shared expert beside routed ones.

Knows no model and no checkpoint. T tokens, D hidden, I width between the two products.
"""

from typing import Any, Self

import torch

from kernels.block_fp8 import Fp8Rows
from kernels.fused import fused_kernels
from workers.layers.builder import LayerBuilder
from workers.layers.linear import activated, linear
from workers.specs.model import MlpSpec, SharedExpertSpec


class MlpBlock:
    """residual + down(activation(gate(h)) * up(h)) with h = norm(residual)."""

    def __init__(self, builder: LayerBuilder, spec: MlpSpec, layer: int):
        dim, self.activation = builder.hidden_size, spec.activation
        self.norm = builder.norm(dim)
        self.w13_2ID = builder.projection("mlp.w13_2ID", 2 * spec.width, dim)
        self.w2_DI = builder.projection("mlp.w2_DI", dim, spec.width)

    def with_backends(self, backends: Any) -> Self:
        """Return the block itself, which uses no backend."""
        return self

    def hold_experts(self, experts: range, kept: range) -> None:
        """Do nothing: the block has no experts."""

    def route_by(self, forced: Any) -> None:
        """Do nothing: the block has no router."""

    def forward(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Padding rows are computed and ignored."""
        residual_TD, h_TD = self.norm.add_for(self.w13_2ID, residual_TD, hidden_TD)
        inner_TI = activated(linear(h_TD, self.w13_2ID), self.activation, self.w2_DI)
        return linear(inner_TI, self.w2_DI, residual_TD), None


class SharedExpert:
    """An MLP that every token passes through; `gated`: times sigmoid(h @ gate), one factor a token."""

    def __init__(self, builder: LayerBuilder, spec: SharedExpertSpec):
        dim, self.activation = builder.hidden_size, spec.activation
        self.w13_2ID = builder.projection("mlp.shared.w13_2ID", 2 * spec.width, dim)
        self.w2_DI = builder.projection("mlp.shared.w2_DI", dim, spec.width)
        self.gate_1D = builder.empty(1, dim) if spec.gated else None

    def add_to(self, residual_TD: torch.Tensor, h_TD: torch.Tensor) -> torch.Tensor:
        """Return residual + the output for h, a new tensor."""
        inner_TI = activated(linear(h_TD, self.w13_2ID), self.activation, self.w2_DI)
        if self.gate_1D is None:
            return linear(inner_TI, self.w2_DI, residual_TD)
        logit_T1 = linear(h_TD, self.gate_1D)
        fused = fused_kernels(h_TD.device.type)
        if fused is not None:
            return fused.gated_sum(residual_TD, linear(inner_TI, self.w2_DI), logit_T1)
        factor_T1 = logit_T1.sigmoid_()
        if isinstance(inner_TI, Fp8Rows):
            return torch.addcmul(residual_TD, linear(inner_TI, self.w2_DI), factor_T1)
        # a factor of a row passes through the product
        return linear(inner_TI.mul_(factor_T1), self.w2_DI, residual_TD)
