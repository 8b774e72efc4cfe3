"""An EAGLE-3 draft model as plain data. Needs no torch."""

from dataclasses import dataclass
from typing import ClassVar

from workers.specs.model import GqaSpec, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Eagle3AttentionSpec(GqaSpec):
    """Attention with q, k and v of two vectors side by side: the embedding of a token, and a state.

    norm_before_residual   the residual is the normed state, not the state
    """

    block: ClassVar[str] = "workers.models.eagle3.attention:Eagle3Attention"
    weights: ClassVar[str] = "workers.models.eagle3.weights:eagle3_attention_weights"

    norm_before_residual: bool = False


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """A draft model of one dense layer for a target model.

    model             the layer, with the target's vocabulary
    aux_layers        layers of the target with the hidden states that it reads, ascending
    target_dim        width of these hidden states
    draft_vocab_size  tokens that it can draft, each a token of the target
    own_embedding     the checkpoint has an embedding; else the target's is used
    own_head          the checkpoint has an output head; else the target's is used
    maps_tokens       its tokens may have other numbers than the target's
    norm_before_fc    the hidden states are normed as one vector
    fc_norm           the hidden states are normed each alone (EAGLE 3.1)
    norm_output       the states of the next depth are normed
    """

    model: ModelConfig
    aux_layers: tuple[int, ...]
    target_dim: int
    draft_vocab_size: int
    own_embedding: bool
    own_head: bool
    maps_tokens: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
