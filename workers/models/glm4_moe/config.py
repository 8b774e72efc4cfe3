"""Reads config.json of GLM-4.5, 4.6 and 4.7 and maps their weights. Needs no torch; knows nothing of ranks."""

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.models.deepseek_reads import (
    TRAINING_KEYS,
    finish_with_prediction,
    read_biased_router,
    read_experts,
    read_layers,
)
from workers.specs.model import GqaSpec, ModelConfig

DEFAULTS = {  # as transformers has them
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}
PARTIAL_ROTARY = 0.5
NAMES = WeightNames(shared="mlp.shared_experts")


def read_config(read: ConfigReader, names: WeightNames = NAMES) -> ModelConfig:
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
    return finish_with_prediction(read, layers, moe, names)
