"""Reads config.json of DeepSeek-V2 and V2-Lite and maps their weights. Needs no torch; knows nothing of ranks."""

from collections.abc import Iterator

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames, decoder_weights
from workers.models.deepseek_reads import (
    TRAINING_KEYS,
    read_experts,
    read_layers,
    read_mla,
)
from workers.specs.model import ModelConfig, RouterSpec
from workers.specs.weight_map import WeightEntry

DEFAULTS = {  # as transformers has them, which has none for num_experts_per_tok
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": None,
    "topk_group": None,
    "num_experts_per_tok": None,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
NAMES = WeightNames(shared="mlp.shared_experts")


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    attention = read_mla(read)
    moe = read_experts(read, _read_router(read))
    read.fixed("mlp_bias", False, None)
    read.ignore(*TRAINING_KEYS)
    return read.finish(read_layers(read, attention, moe), moe)


def _read_router(read: ConfigReader) -> RouterSpec:
    """Return the router; weights are never renormalised, as in transformers and in all releases."""
    read.fixed("scoring_func", "softmax", None)
    read.fixed("norm_topk_prob", False, None)
    read.fixed("topk_method", "greedy", "group_limited_greedy", None)
    grouped = read.raw("topk_method") == "group_limited_greedy"
    read.ignore("n_group", "topk_group")
    return RouterSpec(
        top_k=read.integer("num_experts_per_tok") or 1,
        norm_topk_prob=False,
        routed_scaling_factor=read.number("routed_scaling_factor"),
        num_groups=read.integer("n_group") or 1 if grouped else 1,
        topk_group=read.integer("topk_group") or 1 if grouped else 1,
        group_score="max",
    )


def weight_map(config: ModelConfig) -> Iterator[WeightEntry]:
    """Yield every tensor of a checkpoint but scales."""
    return decoder_weights(config, NAMES)
