"""DeepSeek-V2, read from top to bottom. Knows nothing of requests, steps or files.

T tokens (padding included), D hidden, r rotated values of a head.
"""

import torch

from workers.models.causal_lm import CausalLM, add_hidden
from workers.step.forward_batch import ForwardBatch


class DeepseekV2ForCausalLM(CausalLM):
    """Latent attention; softmax router, maybe with groups by their best expert; shared experts.

    The first layers have a dense MLP in place of experts.
    """

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden_TD after the last layer."""
        rotation_T1r = self.rotation(batch.positions)
        residual_TD, hidden_TD = torch.embedding(self.embed_VD, batch.input_ids), None
        for attention, mlp in self.layers:
            residual_TD, hidden_TD = attention.forward(residual_TD, hidden_TD, rotation_T1r)
            residual_TD, hidden_TD = mlp.forward(residual_TD, hidden_TD, batch)
        return add_hidden(residual_TD, hidden_TD)
