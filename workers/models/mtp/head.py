"""A head for multi-token prediction: drafts the token behind the next token. One module for all published layouts.

T tokens (padding included), L rows with logits, D hidden, V vocabulary. Knows nothing of requests and of verification.
"""

from typing import Any

import torch

from kernels.backends.select import Backends
from kernels.block_fp8 import quantise_blocks
from workers.layers.builder import LayerBuilder
from workers.layers.linear import Fp8Linear, Linear
from workers.models.decoder import DecoderLM
from workers.models.layer_stack import LayerStack
from workers.specs.model import ModelConfig
from workers.step.forward_batch import ForwardBatch
from workers.weights.tensors import draft_head_bytes


class MtpHead(LayerStack):
    """norm(layer(projection(norm(embedding of the next token), norm(hidden state)))), then the output head of `target`.

    Applied K times, each time to its own output and the token that was drafted from it, it drafts K tokens.

    aux_layers   layers of `target` with hidden states that the head reads beside the last: none

    Drafts are drawn with a copy of the output head in FP8 where `draft_head_bytes` has one.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, target: DecoderLM, config: ModelConfig, backends: Backends, **place: Any):
        """place: as LayerStack."""
        self._target = target
        self._in_fp8 = (
            draft_head_bytes(target.config, fp8_dense=backends.grouped_gemm.fp8_dense) > 0
        )
        self._draft_head: Linear | None = None
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

        batch    the tokens and images that follow those of the states, at the positions of the states
        states   of `read_target`, or of the forward before
        """
        embedded_TD = self.embedding_norm(self._target.embed_rows(batch))
        residual_TD = self.projection(torch.cat((embedded_TD, self.hidden_norm(states_TD)), -1))
        return self.norm(self.run_layers(residual_TD, batch))

    def compute_logits(self, states_LD: torch.Tensor) -> torch.Tensor:
        """Return float32 [L, V] of rows of forward's result."""
        return self._target.project_logits(states_LD)

    def filled(self) -> None:
        """Also note that the output head of the target was read, and choose the head that drafts."""
        super().filled()
        head = self._target.lm_head
        assert head is not None, "the target has no logits"
        if self._draft_head is None:
            self._draft_head = Fp8Linear(quantise_blocks(head.weight)) if self._in_fp8 else head

    def draft(self, states_LD: torch.Tensor) -> torch.Tensor:
        """Return the most likely token of each row, int64 [L]. After `filled`."""
        assert self._draft_head is not None, "the weights were not read"
        return self._draft_head(states_LD).argmax(-1)
