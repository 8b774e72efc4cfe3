"""Reads config.json of Qwen3-Next and maps its weights. Needs no torch; knows nothing of ranks or devices."""

from collections.abc import Iterator

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames, decoder_weights
from workers.models.delta_net_reads import CHECKPOINT_DELTA_NETS, DELTA_NETS, read_hybrid_layers
from workers.models.specs import MlpSpec, ModelConfig
from workers.weights.weight_map import WeightEntry

DEFAULTS = {  # as transformers has them
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    **DELTA_NETS,
}
# What `make_checkpoint` writes into config.json beside sizes; its sizes under other names, None where there is none.
CHECKPOINT_FIELDS = {
    **CHECKPOINT_DELTA_NETS,
    "decoder_sparse_step": 1,
    "intermediate_size": 96,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
}
CHECKPOINT_NAMES: dict[str, str | None] = {}
NAMES = WeightNames(joined_delta_inputs=True)
SKIPPED = ("mtp.",)  # multi-token prediction


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    dense = MlpSpec(width=read.integer("intermediate_size"), activation=read.activation())
    renormalise = read.boolean("norm_topk_prob")
    layers, moe = read_hybrid_layers(read, renormalise=renormalise, dense=dense)
    return read.finish(layers, moe, skipped=SKIPPED, norm_offset=1.0)


def weight_map(config: ModelConfig) -> Iterator[WeightEntry]:
    """Yield every tensor of a checkpoint but scales."""
    return decoder_weights(config, NAMES)
