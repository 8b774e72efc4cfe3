"""Reads config.json of Qwen3-Next and maps its weights. Needs no torch; knows nothing of ranks or devices."""

from collections.abc import Iterator

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames, decoder_weights
from workers.models.gdn_reads import (
    HYBRID_DEFAULTS,
    read_hybrid_layers,
)
from workers.specs.model import MlpSpec, ModelConfig
from workers.specs.weight_map import WeightEntry

DEFAULTS = {
    **HYBRID_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "decoder_sparse_step": 1,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}
NAMES = WeightNames(joined_delta_inputs=True)
SKIPPED = ("mtp.",)  # multi-token prediction


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    dense = MlpSpec(
        intermediate_size=read.integer("intermediate_size"), activation=read.activation()
    )
    norm_topk_prob = read.boolean("norm_topk_prob")
    layers, moe = read_hybrid_layers(read, norm_topk_prob=norm_topk_prob, dense=dense)
    return read.finish(layers, moe, skipped=SKIPPED, norm_offset=1.0)


def weight_map(config: ModelConfig) -> Iterator[WeightEntry]:
    """Yield every tensor of a checkpoint but scales."""
    return decoder_weights(config, NAMES)
