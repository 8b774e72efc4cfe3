"""Reads config.json of GLM-4.7-Flash and maps its weights. Needs no torch; knows nothing of ranks or devices."""

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
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 20,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 202752,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
NAMES = WeightNames(shared="mlp.shared_experts")


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    attention = read_mla(read)
    moe = read_experts(read, read_biased_router(read))
    read.fixed("partial_rotary_factor", 1, None)
    read.ignore(*TRAINING_KEYS)
    layers = read_layers(read, attention, moe)
    kinds = ["sparse" if layer.mlp is moe else "dense" for layer in layers]
    read.fixed(
        "mlp_layer_types", kinds, None
    )  # transformers 5 saves the list in the place of the number
    return read.finish(layers, moe, skipped=prediction_layers(read))


def weight_map(config: ModelConfig) -> Iterator[WeightEntry]:
    """Yield every tensor of a checkpoint but scales and those of skipped layers."""
    return decoder_weights(config, NAMES)
