"""Dense gated MLPs: the one of a layer without experts, and the shared expert beside routed ones.

Knows no model and no checkpoint. T tokens, D hidden, I width between the two products.
"""

from typing import Any, Self

import torch

from kernels.fused import fused_kernels
from kernels.lora.rows import AdapterRows
from kernels.routing.expert_map import ExpertMap
from workers.layers.builder import LayerBuilder
from workers.layers.linear import Rows
from workers.layers.norm import Gate
from workers.specs.model import MlpSpec, SharedExpertSpec
from workers.step.forward_batch import ForwardBatch


class MlpBlock:
    """residual + down(activation(gate(h)) * up(h)) with h = norm(residual)."""

    def __init__(self, builder: LayerBuilder, spec: MlpSpec, layer: int):
        dim, self.activation = builder.hidden_size, spec.activation
        self.norm = builder.norm(dim)
        self.gate_up = builder.linear("mlp.gate_up", 2 * spec.intermediate_size, dim)
        self.down = builder.linear("mlp.down", dim, spec.intermediate_size)

    def with_backends(self, backends: Any) -> Self:
        """Return the block itself, which uses no backend."""
        return self

    def hold_experts(self, expert_map: ExpertMap, rank: int) -> None:
        """Do nothing: the block has no experts."""

    def route_by(self, forced: Any) -> None:
        """Do nothing: the block has no router."""

    def forward(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Padding rows are computed and ignored."""
        adapters = batch.adapters
        residual_TD, h_TD = self.norm.add_for(self.gate_up, residual_TD, hidden_TD, adapters)
        gate_up_T2I = self.gate_up(h_TD, adapters=adapters)
        inner_TI = self.down.activate(gate_up_T2I, self.activation, adapters)
        return self.down(inner_TI, residual_TD, adapters=adapters), None


class SharedExpert:
    """An MLP that every token passes through; `gated`: times sigmoid(h @ gate), one factor a token."""

    def __init__(self, builder: LayerBuilder, spec: SharedExpertSpec):
        dim, self.activation = builder.hidden_size, spec.activation
        self.gate_up = builder.linear("mlp.shared.gate_up", 2 * spec.intermediate_size, dim)
        self.down = builder.linear("mlp.shared.down", dim, spec.intermediate_size)
        self.gate = builder.dense(1, dim) if spec.gated else None
        self._fused = fused_kernels(builder.device.type)

    def gate_of(self, num_rows: int) -> Gate | None:
        """Return what the norm before multiplies its rows by and where to; None: `add_to` does so, or has no gate."""
        if self.gate is None or self._fused is None:
            return None
        weight_1D = self.gate.weight
        return weight_1D[0], weight_1D.new_empty(num_rows, 1)

    def add_to(
        self,
        residual_TD: torch.Tensor,
        rows_TD: Rows,
        h_TD: torch.Tensor,
        gate: Gate | None,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """Return residual + the output for h, a new tensor.

        rows   h in the form that `gate_up` takes
        gate   of `gate_of`, after the norm
        """
        gate_up_T2I = self.gate_up(rows_TD, adapters=adapters)
        inner_TI = self.down.activate(gate_up_T2I, self.activation, adapters)
        if self.gate is None:
            return self.down(inner_TI, residual_TD, adapters=adapters)
        out_TD = self.down(inner_TI, adapters=adapters)
        if self._fused is not None and gate is not None:
            return self._fused.gated_sum(residual_TD, out_TD, gate[1])
        return torch.addcmul(residual_TD, out_TD, self.gate(h_TD).sigmoid_())
