"""An EAGLE-3 draft model: drafts tokens from hidden states of layers of its target. Dense, so without collectives.

T tokens (padding included), L rows with logits, D hidden, V vocabulary, d tokens that can be drafted. Knows nothing of
requests and of verification.
"""

from typing import Any

import torch

from kernels.backends.select import Backends
from workers.layers.builder import LayerBuilder
from workers.models.decoder import DecoderLM
from workers.models.eagle3.spec import Eagle3Config
from workers.models.layer_stack import LayerStack
from workers.step.forward_batch import ForwardBatch


class Eagle3Head(LayerStack):
    """layer(embedding of the next token, state); the first state is a projection of the target's hidden states.

    aux_layers   layers of `target` with the hidden states that it reads
    """

    def __init__(self, target: DecoderLM, eagle: Eagle3Config, backends: Backends, **place: Any):
        """place: as LayerStack."""
        self._target, self._eagle = target, eagle
        self.aux_layers = eagle.aux_layers
        super().__init__(eagle.model, backends, **place)

    def _allocate(self, builder: LayerBuilder) -> None:
        eagle, dim = self._eagle, builder.hidden_size
        aux_dim = len(eagle.aux_layers) * eagle.target_dim
        self.aux_norm = builder.norm(aux_dim) if eagle.norm_before_fc else None
        layers = eagle.aux_layers if eagle.fc_norm else ()
        self.aux_norms = [builder.norm(eagle.target_dim) for _ in layers]
        self.fc = builder.dense(dim, aux_dim)
        self.embed_VD = self._target.embed_VD
        if eagle.own_embedding:
            self.embed_VD = builder.empty(eagle.model.vocab_size, dim)
        self.norm = builder.norm(dim)
        self.lm_head = self._target.lm_head
        if eagle.own_head:
            self.lm_head = builder.dense(eagle.draft_vocab_size, dim)
        self.token_offset_d = builder.empty(eagle.draft_vocab_size, dtype=torch.int64)
        if not eagle.maps_tokens:
            self.token_offset_d.zero_()

    def share_embedding(self) -> None:
        """Use the target's embedding where the checkpoint repeats it. Call it when both are loaded."""
        shared_VD = self._target.embed_VD
        if self.embed_VD.shape == shared_VD.shape and torch.equal(self.embed_VD, shared_VD):
            self.embed_VD = shared_VD

    def read_target(
        self, hidden_TD: torch.Tensor, hidden_after: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Return the states [T, D] for `forward`, of the hidden states after `aux_layers` in the target's forward."""
        aux = [hidden_after[layer] for layer in self.aux_layers]
        if self.aux_norms:
            aux = [norm(x_TD) for norm, x_TD in zip(self.aux_norms, aux, strict=True)]
        aux_TA = torch.cat(aux, -1)
        return self.fc(aux_TA if self.aux_norm is None else self.aux_norm(aux_TA))

    def forward(self, batch: ForwardBatch, states_TD: torch.Tensor) -> torch.Tensor:
        """Return states [T, D]: for `compute_logits`, and for the next forward. Call `attention.plan(batch)` before.

        batch    the tokens that follow those of the states, at the positions of the states
        states   of `read_target`, or of the forward before
        """
        embedded_TD = torch.embedding(self.embed_VD, batch.input_ids)
        states_TD = self.run_layers(torch.cat((embedded_TD, states_TD), -1), batch)
        return self.norm(states_TD) if self._eagle.norm_output else states_TD

    def compute_logits(self, states_LD: torch.Tensor) -> torch.Tensor:
        """Return float32 [L, d] of rows of forward's result."""
        normed_LD = states_LD if self._eagle.norm_output else self.norm(states_LD)
        assert self.lm_head is not None, "the target has no logits"
        return self.lm_head(normed_LD).float()

    def draft(self, states_LD: torch.Tensor) -> torch.Tensor:
        """Return the most likely token of each row, int64 [L], as the target numbers tokens."""
        found_L = self.compute_logits(states_LD).argmax(-1)
        return found_L + self.token_offset_d.index_select(0, found_L)
