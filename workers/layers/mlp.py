"""The dense gated MLP of a decoder layer. Knows no model and no checkpoint.

T tokens, D hidden, I width between the two products.
"""

from typing import Any, Self

import torch
from torch.nn import functional as F

from workers.layers.builder import LayerBuilder
from workers.layers.linear import linear
from workers.models.specs import MlpSpec


class MlpBlock:
    """residual + down(activation(gate(h)) * up(h)) with h = norm(residual)."""

    def __init__(self, builder: LayerBuilder, spec: MlpSpec):
        dim = builder.hidden_size
        self.norm = builder.norm(dim)
        self.w13_2ID = builder.empty(2 * spec.width, dim)
        self.w2_DI = builder.empty(dim, spec.width)

    def with_kernels(self, kernels: Any) -> Self:
        """Return the block itself, which uses no backend."""
        return self

    def forward(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Padding rows are computed and ignored."""
        residual_TD, h_TD = self.norm.add(residual_TD, hidden_TD)
        gate_TI, up_TI = linear(h_TD, self.w13_2ID).chunk(2, dim=-1)
        return linear(F.silu(gate_TI).mul_(up_TI), self.w2_DI, residual_TD), None
