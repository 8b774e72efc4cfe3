"""The weight map of a decoder, layer by layer as the specs name their weights. Needs no torch.

A family gives the names that its checkpoints use; shapes and rows follow from the config.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name

from workers.specs.four_bit import FourBitForm
from workers.specs.model import ModelConfig
from workers.specs.weight_map import WeightEntry, WeightKind

Weights = Iterator[WeightEntry]


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """Names in which checkpoints of families differ, below `layers.N` but for `root`."""

    root: str = "model."
    moe: str = "mlp"
    router: str = "gate.weight"
    expert_gate: str = "experts.{}.gate_proj.weight"
    expert_up: str = "experts.{}.up_proj.weight"
    expert_down: str = "experts.{}.down_proj.weight"
    fused_gate_up: str = (
        "experts.gate_up_proj"  # of all experts, where a checkpoint has such tensors
    )
    fused_down: str = "experts.down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate_up: str = ""  # gate and up of the shared expert as one tensor
    shared_down: str = "down_proj"
    stacked_experts: bool = (
        False  # one tensor for all experts, gate and up alternating, as gpt-oss has them
    )
    router_bias: str = "gate.e_score_correction_bias"
    router_bias_is_row: bool = False  # stored as [1, E]
    joined_delta_inputs: bool = False  # of delta nets: one tensor of q, k, v and gate by key head

    def __call__(self, config: ModelConfig) -> Weights:
        """Yield every tensor of the checkpoint but scales and skipped parts, in the order of the forward."""
        table = (config.vocab_size, config.hidden_size)
        root, offset = self.root, config.norm_offset
        yield WeightEntry(f"{root}embed_tokens.weight", table, "embed_VD", WeightKind.EMBEDDING)
        for number, layer in enumerate(config.layers):
            at, path = f"{root}layers.{number}.", f"layers.{number}."
            block = LayerWeights(self, config.hidden_size, at, path, config.stacked_form, offset)
            for spec in (layer.attention, layer.mlp):
                yield from resolve_name(spec.weights)(block, spec)
        shape = (config.hidden_size,)
        yield WeightEntry(f"{root}norm.weight", shape, "norm", WeightKind.NORM, offset=offset)
        if config.has_logits and not config.tie_word_embeddings:
            yield WeightEntry("lm_head.weight", table, "lm_head.weight", WeightKind.HEAD)
        if config.num_labels:
            table = (config.num_labels, config.hidden_size)
            yield WeightEntry("score.weight", table, "score.weight", WeightKind.HEAD)


@dataclass(frozen=True)
class LayerWeights:
    """The tensors of one layer: `disk` begins names in the checkpoint, `path` begins those of parameters.

    four_bit   how tensors that hold all experts are packed; None: they are not
    """

    names: WeightNames
    dim: int
    disk: str
    path: str
    four_bit: FourBitForm | None = None
    norm_offset: float = 0.0

    def norm(self, name: str, parameter: str) -> WeightEntry:
        return WeightEntry(
            f"{self.disk}{name}.weight",
            (self.dim,),
            self.path + parameter,
            WeightKind.NORM,
            offset=self.norm_offset,
        )
