"""Mixtral, read from top to bottom. Knows nothing of requests, steps or files.

T tokens (padding included), D hidden, d head dim.
"""

import torch

from workers.models.causal_lm import CausalLM, add_hidden
from workers.step.forward_batch import ForwardBatch


class MixtralForCausalLM(CausalLM):
    """Plain grouped-query attention; every layer has experts."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden_TD after the last layer."""
        rotation_T1d = self.rotation(batch.positions)
        residual_TD, hidden_TD = torch.embedding(self.embed_VD, batch.input_ids), None
        for attention, experts in self.layers:
            residual_TD, hidden_TD = attention.forward(residual_TD, hidden_TD, rotation_T1d)
            residual_TD, hidden_TD = experts.forward(residual_TD, hidden_TD, batch)
        return add_hidden(residual_TD, hidden_TD)
