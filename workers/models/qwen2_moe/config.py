"""Reads config.json of Qwen2-MoE and maps its weights. Needs no torch; knows nothing of ranks or devices."""

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
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
NAMES = WeightNames()


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    heads = read.integer("num_attention_heads")
    attention = GqaSpec(
        num_heads=heads,
        num_kv_heads=read.integer_or("num_key_value_heads", heads),
        head_dim=read.integer_or("head_dim", max(1, read.integer("hidden_size") // heads)),
        rope=read.rope(),
        qkv_bias=read.boolean("qkv_bias"),
    )
    router = RouterSpec(
        top_k=read.integer("num_experts_per_tok"), norm_topk_prob=read.boolean("norm_topk_prob")
    )
    activation = read.activation()
    shared = SharedExpertSpec(
        intermediate_size=read.integer("shared_expert_intermediate_size"),
        activation=activation,
        gated=True,
    )
    moe = MoeSpec(
        num_experts=read.integer("num_experts"),
        intermediate_size=read.integer("moe_intermediate_size"),
        activation=activation,
        router=router,
        shared=shared,
    )
    dense = MlpSpec(intermediate_size=read.integer("intermediate_size"), activation=activation)
    read.fixed("use_sliding_window", False, None)
    read.ignore("sliding_window", "max_window_layers")
    layers = tuple(
        LayerSpec(attention=attention, mlp=moe if has_experts else dense)
        for has_experts in read.layers_with_experts()
    )
    return read.finish(layers, moe)
