"""Reads config.json of DeepSeek-V3, R1 and Kimi-K2 and maps their weights. Needs no torch; knows nothing of ranks."""

from collections.abc import Iterator

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames, decoder_weights
from workers.models.deepseek_reads import (
    TRAINING_KEYS,
    prediction_layers,
    read_biased_router,
    read_experts,
    read_layers,
    read_mla,
)
from workers.specs.model import ModelConfig
from workers.specs.weight_map import WeightEntry

DEFAULTS = {  # as transformers has them
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
NAMES = WeightNames(shared="mlp.shared_experts")


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    attention = read_mla(read)
    moe = read_experts(read, read_biased_router(read))
    read.ignore(*TRAINING_KEYS)
    layers = read_layers(read, attention, moe)
    return read.finish(layers, moe, skipped=prediction_layers(read))


def weight_map(config: ModelConfig) -> Iterator[WeightEntry]:
    """Yield every tensor of a checkpoint but scales and those of skipped layers."""
    return decoder_weights(config, NAMES)
