"""The attention half of an EAGLE-3 draft layer. Knows no checkpoint.

T tokens, D hidden, r rotated values of a head.
"""

import torch

from kernels.lora.rows import AdapterRows
from workers.layers.attention import AttentionBlock
from workers.layers.builder import LayerBuilder
from workers.models.eagle3.spec import Eagle3AttentionSpec
from workers.models.eagle3.weights import INPUTS


class Eagle3Attention(AttentionBlock):
    """state + o_proj(attention(q, k and v of norm(embedding) beside norm(state))); or norm(state) + the same."""

    num_inputs = INPUTS

    def __init__(self, builder: LayerBuilder, spec: Eagle3AttentionSpec, layer: int):
        super().__init__(builder, spec, layer)
        self.hidden_norm = builder.norm(builder.hidden_size)
        self._norm_before_residual = spec.norm_before_residual

    def forward(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        rotation_T1d: torch.Tensor,
        adapters: AdapterRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a sum [T, D]; residual is [T, 2D], the embeddings beside the states, and hidden is None.

        Adapters change the model alone, not its drafts.
        """
        assert hidden_TD is None, "the layer is the first"
        embedded_TD, states_TD = residual_TD.chunk(INPUTS, -1)
        normed_TD = self.hidden_norm(states_TD)
        qkv_TQ = self.qkv(torch.cat((self.input_norm(embedded_TD), normed_TD), -1))
        o_TO = self._attend(qkv_TQ.view(-1, *self._heads), rotation_T1d).flatten(1)
        start_TD = normed_TD if self._norm_before_residual else states_TD.contiguous()
        return self.o(o_TO, start_TD), None
