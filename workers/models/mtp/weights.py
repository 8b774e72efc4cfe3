"""Heads for multi-token prediction as checkpoints carry them: the weight map of a head, and its config.

A head is a model of one layer, which shares embedding and output head with the model of its checkpoint. Of several
heads the first one is used. Needs no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pkgutil import resolve_name

from workers.models.decoder_weights import LayerWeights, WeightNames
from workers.specs.model import GqaSpec, LayerSpec, MlaSpec, ModelConfig
from workers.specs.weight_map import WeightEntry, WeightKind


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """Names of a head's tensors: `root` begins all of them, `layer` those of its decoder layer, both end in a dot.

    layer_names   names inside the decoder layer
    shared        tensors below `root` that repeat the model's embedding and output head
    projection_kind  PROJECTION where quantisation may name the projection of embedding and hidden state
    """

    root: str
    layer: str
    layer_names: WeightNames
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    shared: tuple[str, ...] = ()
    projection_kind: WeightKind = WeightKind.PROJECTION

    def __call__(self, config: ModelConfig) -> Iterator[WeightEntry]:
        """Yield every tensor of the head but scales, in the order of the forward."""
        dim, offset = config.hidden_size, config.norm_offset

        def norm(name: str, parameter: str) -> WeightEntry:
            name = f"{self.root}{name}.weight"
            return WeightEntry(name, (dim,), parameter, WeightKind.NORM, offset=offset)

        yield norm(self.embedding_norm, "embedding_norm")
        yield norm(self.hidden_norm, "hidden_norm")
        name = f"{self.root}{self.projection}.weight"
        yield WeightEntry(name, (dim, 2 * dim), "projection.weight", self.projection_kind)
        (layer,) = config.layers
        path, form = "layers.0.", config.stacked_form
        block = LayerWeights(self.layer_names, dim, self.layer, path, form, offset)
        for spec in (layer.attention, layer.mlp):
            yield from resolve_name(spec.weights)(block, spec)
        yield norm(self.norm, "norm")


def qwen_names(layer_names: WeightNames) -> MtpNames:
    """Return the names of Qwen3-Next, Qwen3.5 and Qwen3.6: the norms and the projection stand beside the layer."""
    return MtpNames(
        root="mtp.",
        layer="mtp.layers.0.",
        layer_names=layer_names,
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        norm="norm",
    )


def deepseek_names(layer_names: WeightNames, num_layers: int) -> MtpNames:
    """Return the names of DeepSeek-V3 and GLM: the head is one more layer, behind the `num_layers` of the model."""
    layer = f"{layer_names.root}layers.{num_layers}."
    return MtpNames(
        root=layer,
        layer=layer,
        layer_names=layer_names,
        embedding_norm="enorm",
        hidden_norm="hnorm",
        projection="eh_proj",
        norm="shared_head.norm",
        shared=("embed_tokens.", "shared_head.head."),
        # releases in FP8 keep it in 16 bits and do not name it among the modules without quantisation
        projection_kind=WeightKind.DRAFT_PROJECTION,
    )


def with_mtp(config: ModelConfig, attention: GqaSpec | MlaSpec, names: MtpNames) -> ModelConfig:
    """Return `config` with a head that has these names, this attention and the model's experts."""
    head = replace(
        config,
        layers=(LayerSpec(attention=attention, mlp=config.moe),),
        weight_entries=names,
        kept=(names.root,),
        skipped=tuple(names.root + name for name in names.shared),
        skipped_parts=(),
        vision=None,
    )
    return replace(config, mtp=head)
