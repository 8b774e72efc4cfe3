"""Reads config.json of DeepSeek-V3, R1 and Kimi-K2 and maps their weights. Needs no torch; knows nothing of ranks."""

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.models.deepseek_reads import (
    TRAINING_KEYS,
    finish_with_prediction,
    read_biased_router,
    read_experts,
    read_layers,
    read_mla,
)
from workers.specs.model import ModelConfig

DEFAULTS = {  # as transformers has them
    "num_nextn_predict_layers": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
}
NAMES = WeightNames(shared="mlp.shared_experts")


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    attention = read_mla(read)
    moe = read_experts(read, read_biased_router(read))
    read.ignore(*TRAINING_KEYS)
    layers = read_layers(read, attention, moe)
    return finish_with_prediction(read, layers, moe, NAMES)
