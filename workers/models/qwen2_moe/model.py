"""Qwen2-MoE, read from top to bottom. Knows nothing of requests, steps or files.

T tokens (padding included), D hidden, d head dim.
"""

import torch

from workers.layers.attention import AttentionBlock
from workers.layers.builder import LayerBuilder
from workers.layers.mlp import MlpBlock
from workers.layers.moe import MoeBlock
from workers.models.causal_lm import CausalLM, Layer, add_hidden
from workers.models.specs import LayerSpec, MoeSpec
from workers.runner.forward_batch import ForwardBatch


class Qwen2MoeForCausalLM(CausalLM):
    """q, k and v have biases; a layer has experts with a gated shared one beside them, or one dense MLP."""

    def build_layer(self, builder: LayerBuilder, spec: LayerSpec, number: int) -> Layer:
        attention = AttentionBlock(builder, spec.attention, number)
        if isinstance(spec.mlp, MoeSpec):
            return Layer(attention, MoeBlock(builder, spec.mlp, number))
        return Layer(attention, MlpBlock(builder, spec.mlp))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden_TD after the last layer."""
        rotation_T1d = self.rotation(batch.positions)
        residual_TD, hidden_TD = torch.embedding(self.embed_VD, batch.input_ids), None
        for attention, mlp in self.layers:
            residual_TD, hidden_TD = attention.forward(residual_TD, hidden_TD, rotation_T1d)
            residual_TD, hidden_TD = mlp.forward(residual_TD, hidden_TD, batch)
        return add_hidden(residual_TD, hidden_TD)
