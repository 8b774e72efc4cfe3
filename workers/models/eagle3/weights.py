"""The weight map of an EAGLE-3 draft model, by the names of EAGLE's releases. Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name

from workers.models.attention_weights import gqa_weights
from workers.models.decoder_weights import LayerWeights, WeightNames
from workers.models.eagle3.spec import Eagle3AttentionSpec
from workers.specs.model import ModelConfig
from workers.specs.weight_map import WeightEntry, WeightKind

LAYER = "midlayer."
RENAMED = (("layers.0.", LAYER), ("model.", ""))  # in the layout of the speculators library
SKIPPED = ("t2d", "model.t2d")  # which tokens of the target can be drafted; d2t has them too
INPUTS = 2  # vectors that q, k and v are products of


@dataclass(frozen=True, kw_only=True)
class Eagle3Names:
    """The tensors of a draft model; the fields are those of Eagle3Config."""

    num_aux: int
    target_dim: int
    draft_vocab_size: int
    own_embedding: bool
    own_head: bool
    maps_tokens: bool
    norm_before_fc: bool
    fc_norm: bool

    def __call__(self, config: ModelConfig) -> Iterator[WeightEntry]:
        """Yield every tensor in the order of the forward."""
        dim, vocab_size = config.hidden_size, config.vocab_size
        norm, aux_dim = WeightKind.NORM, self.num_aux * self.target_dim
        if self.norm_before_fc:
            yield WeightEntry("input_norm.weight", (aux_dim,), "aux_norm", norm)
        for number in range(self.num_aux if self.fc_norm else 0):
            name, parameter = f"fc_norm.{number}.weight", f"aux_norms.{number}"
            yield WeightEntry(name, (self.target_dim,), parameter, norm)
        yield WeightEntry("fc.weight", (dim, aux_dim), "fc.weight", WeightKind.DRAFT_PROJECTION)
        if self.own_embedding:
            shape = (vocab_size, dim)
            yield WeightEntry("embed_tokens.weight", shape, "embed_VD", WeightKind.EMBEDDING)
        (layer,) = config.layers
        block = LayerWeights(WeightNames(), dim, LAYER, "layers.0.")
        for spec in (layer.attention, layer.mlp):
            yield from resolve_name(spec.weights)(block, spec)
        yield WeightEntry("norm.weight", (dim,), "norm", norm)
        if self.own_head:
            shape = (self.draft_vocab_size, dim)
            yield WeightEntry("lm_head.weight", shape, "lm_head.weight", WeightKind.HEAD)
        if self.maps_tokens:
            kind = WeightKind.TOKEN_OFFSET
            yield WeightEntry("d2t", (self.draft_vocab_size,), "token_offset_d", kind)


def eagle3_attention_weights(
    layer: LayerWeights, spec: Eagle3AttentionSpec
) -> Iterator[WeightEntry]:
    """Those of grouped-query attention, with twice the columns in q, k and v, and the norm of the state."""
    qkv = f"{layer.path}attention.qkv.weight"
    for entry in gqa_weights(layer, spec):
        if entry.parameter == qkv:
            entry = entry._replace(shape=(entry.shape[0], INPUTS * layer.dim))
        yield entry
    yield layer.norm("hidden_norm", "attention.hidden_norm")
