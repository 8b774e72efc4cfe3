"""Reads config.json of GLM-4.7-Flash and maps its weights. Needs no torch; knows nothing of ranks or devices."""

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
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 768,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
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
    return finish_with_prediction(read, layers, moe, NAMES)
