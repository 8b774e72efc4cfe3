"""Reads config.json of ERNIE-4.5 with experts and maps its weights. Needs no torch; knows nothing of ranks."""

from collections.abc import Iterator
from dataclasses import replace

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.specs.model import (
    GqaSpec,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    MoeSpec,
    RouterSpec,
    SharedExpertSpec,
)

DEFAULTS = {  # as transformers has them
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 4,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
}
NAMES = WeightNames(
    shared="mlp.shared_experts",
    router_bias="moe_statics.e_score_correction_bias",
    router_bias_is_row=True,
)
PREDICTION = ("model.mtp_",)  # multi-token prediction
RENAMED = ((".mlp.gate.moe_statics.", ".mlp.moe_statics."),)  # in transformers' own layout


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    heads = read.integer("num_attention_heads")
    attention = GqaSpec(
        num_heads=heads,
        num_kv_heads=read.integer_or("num_key_value_heads", heads),
        head_dim=read.integer_or("head_dim", max(1, read.integer("hidden_size") // heads)),
        rope=replace(read.rope(), interleaved=True),
    )
    moe = _read_experts(read)
    dense = MlpSpec(intermediate_size=read.integer("intermediate_size"), activation=moe.activation)
    read.fixed("use_bias", False, None)
    read.fixed("moe_gate", "topk", None)
    read.fixed("moe_use_aux_free", True, None)
    read.fixed("moe_norm_min", 1e-12, None)
    read.fixed("moe_gate_act", "softmax", None)
    read.fixed("use_rmsnorm", True, None)
    read.ignore("is_quantized", "moe_capacity", "num_nextn_predict_layers")
    layers = tuple(
        LayerSpec(attention=attention, mlp=moe if has_experts else dense)
        for has_experts in _layers_with_experts(read)
    )
    return read.finish(layers, moe, skipped=PREDICTION, renamed=RENAMED)


def _read_experts(read: ConfigReader) -> MoeSpec:
    activation, width = read.activation(), read.integer("moe_intermediate_size")
    shared = read.count("moe_num_shared_experts") * width
    router = RouterSpec(top_k=read.integer("moe_k"), norm_topk_prob=True, bias=True)
    return MoeSpec(
        num_experts=read.integer("moe_num_experts"),
        intermediate_size=width,
        activation=activation,
        router=router,
        shared=SharedExpertSpec(intermediate_size=shared, activation=activation, gated=False)
        if shared
        else None,
    )


def _layers_with_experts(read: ConfigReader) -> Iterator[bool]:
    num_layers, interval = read.integer("num_hidden_layers"), read.integer("moe_layer_interval")
    start, end = read.count("moe_layer_start_index"), num_layers - 1
    if read.raw("moe_layer_end_index") not in (-1, None):
        end = read.integer_or("moe_layer_end_index", end)
    for layer in range(num_layers):
        yield start <= layer <= end and (layer + 1) % interval == 0
