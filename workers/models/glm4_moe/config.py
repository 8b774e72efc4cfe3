"""Reads config.json of GLM-4.5, 4.6 and 4.7 and maps their weights. Needs no torch; knows nothing of ranks."""

from collections.abc import Iterator

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames, decoder_weights
from workers.models.deepseek_reads import (
    TRAINING_KEYS,
    prediction_layers,
    read_biased_router,
    read_experts,
    read_layers,
)
from workers.specs.model import GqaSpec, ModelConfig
from workers.specs.weight_map import WeightEntry

DEFAULTS = {  # as transformers has them
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
    "max_position_embeddings": 131072,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
PARTIAL_ROTARY = 0.5
NAMES = WeightNames(shared="mlp.shared_experts")


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    heads = read.integer("num_attention_heads")
    head_dim = read.integer_or("head_dim", max(1, read.integer("hidden_size") // heads))
    rotary_dim = read.rotary_dim(head_dim, PARTIAL_ROTARY)
    attention = GqaSpec(
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=read.rope(),
        qk_norm="head" if read.boolean("use_qk_norm") else None,
        qkv_bias=read.boolean("attention_bias"),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
    )
    moe = read_experts(read, read_biased_router(read))
    read.ignore(*TRAINING_KEYS)
    layers = read_layers(read, attention, moe)
    return read.finish(layers, moe, skipped=prediction_layers(read))


def weight_map(config: ModelConfig) -> Iterator[WeightEntry]:
    """Yield every tensor of a checkpoint but scales and those of skipped layers."""
    return decoder_weights(config, NAMES)
