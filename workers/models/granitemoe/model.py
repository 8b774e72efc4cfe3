"""Granite-MoE, read from top to bottom. Knows nothing of requests, steps or files.

T tokens (padding included), D hidden, d head dim.
"""

import torch

from workers.models.causal_lm import CausalLM, add_hidden
from workers.step.forward_batch import ForwardBatch


class GraniteMoeForCausalLM(CausalLM):
    """Every layer has experts; embeddings and logits have factors, scores of attention a scale of their own."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden_TD after the last layer."""
        rotation_T1d = self.rotation(batch.positions)
        embedded_TD = torch.embedding(self.embed_VD, batch.input_ids)
        residual_TD, hidden_TD = embedded_TD.mul_(self.config.embedding_factor), None
        for attention, experts in self.layers:
            residual_TD, hidden_TD = attention.forward(residual_TD, hidden_TD, rotation_T1d)
            residual_TD, hidden_TD = experts.forward(residual_TD, hidden_TD, batch)
        return add_hidden(residual_TD, hidden_TD)


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """Granite-MoE with a shared expert beside the routed ones."""
