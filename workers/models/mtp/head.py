"""A head for multi-token prediction: drafts the token behind the next token. One module for all published layouts.

T tokens (padding included), L rows with logits, D hidden, V vocabulary. Knows nothing of requests and of verification.
"""

from typing import Any

import torch

from kernels.backends.select import Backends
from workers.layers.builder import LayerBuilder
from workers.models.decoder import DecoderLM
from workers.models.layer_stack import LayerStack
from workers.specs.model import ModelConfig
from workers.step.forward_batch import ForwardBatch


class MtpHead(LayerStack):
    """norm(layer(projection(norm(embedding of the next token), norm(hidden state)))), then the output head of `target`.

    Applied K times, each time to its own output and the token that was drafted from it, it drafts K tokens.

    aux_layers   layers of `target` with hidden states that the head reads beside the last: none
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, target: DecoderLM, config: ModelConfig, backends: Backends, **place: Any):
        """place: as LayerStack."""
        self._target = target
        super().__init__(config, backends, **place)

    def _allocate(self, builder: LayerBuilder) -> None:
        dim = builder.hidden_size
        self.embedding_norm = builder.norm(dim)
        self.hidden_norm = builder.norm(dim)
        self.projection = builder.dense(dim, 2 * dim)
        self.norm = builder.norm(dim)

    def read_target(
        self, hidden_TD: torch.Tensor, hidden_after: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Return the states [T, D] for `forward`, of the result of the target's forward."""
        return self._target.norm(hidden_TD)

    def forward(self, batch: ForwardBatch, states_TD: torch.Tensor) -> torch.Tensor:
        """Return states [T, D]: for `compute_logits`, and for the next forward. Call `attention.plan(batch)` before.

        batch    the tokens that follow those of the states, at the positions of the states
        states   of `read_target`, or of the forward before
        """
        embedded_TD = self.embedding_norm(self._target.embed(batch.input_ids))
        residual_TD = self.projection(torch.cat((embedded_TD, self.hidden_norm(states_TD)), -1))
        return self.norm(self.run_layers(residual_TD, batch))

    def compute_logits(self, states_LD: torch.Tensor) -> torch.Tensor:
        """Return float32 [L, V] of rows of forward's result."""
        return self._target.project_logits(states_LD)

    def draft(self, states_LD: torch.Tensor) -> torch.Tensor:
        """Return the most likely token of each row, int64 [L]."""
        return self.compute_logits(states_LD).argmax(-1)
