"""Reads config.json of DeepSeek-V2 and V2-Lite and maps their weights. Needs no torch; knows nothing of ranks."""

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.models.deepseek_reads import (
    TRAINING_KEYS,
    read_experts,
    read_layers,
    read_mla,
)
from workers.specs.model import ModelConfig, RouterSpec

DEFAULTS = {  # as transformers has them
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 0,
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
        top_k=read.integer("num_experts_per_tok"),
        norm_topk_prob=False,
        routed_scaling_factor=read.number("routed_scaling_factor"),
        num_groups=read.integer("n_group") if grouped else 1,
        topk_group=read.integer("topk_group") if grouped else 1,
        group_score="max",
    )
