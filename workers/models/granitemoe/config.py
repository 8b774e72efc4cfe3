"""Reads config.json of Granite-MoE and maps its weights. Needs no torch; knows nothing of ranks or devices."""

from dataclasses import replace

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.specs.model import (
    GqaSpec,
    LayerSpec,
    ModelConfig,
    MoeSpec,
    RouterSpec,
    SharedExpertSpec,
)

DEFAULTS = {  # as transformers has them
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "shared_intermediate_size": 0,
}
NAMES = WeightNames(
    moe="block_sparse_moe",
    router="router.layer.weight",
    expert_gate="input_linear.weight[{}].gate",  # in messages alone: files have fused tensors
    expert_up="input_linear.weight[{}].up",
    expert_down="output_linear.weight[{}]",
    fused_gate_up="input_linear.weight",
    fused_down="output_linear.weight",
    shared="shared_mlp",
    shared_gate_up="input_linear",
    shared_down="output_linear",
)
RENAMED = (  # in transformers' own layout
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
)


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it.

    The factor on the output of each block becomes a factor on the embedding: without it the residual is larger by
    1 / factor everywhere, which the norms of all blocks undo when their eps is larger by 1 / factor^2.
    """
    heads, bias = read.integer("num_attention_heads"), read.boolean("attention_bias")
    attention = GqaSpec(
        num_heads=heads,
        num_kv_heads=read.integer_or("num_key_value_heads", heads),
        head_dim=read.integer_or("head_dim", max(1, read.integer("hidden_size") // heads)),
        rope=read.rope(),
        qkv_bias=bias,
        output_bias=bias,
        score_scale=read.number("attention_multiplier"),
    )
    moe = _read_experts(read)
    layers = (LayerSpec(attention=attention, mlp=moe),) * read.integer("num_hidden_layers")
    block, embedding = read.number("residual_multiplier"), read.number("embedding_multiplier")
    logits = read.number("logits_scaling")
    config = read.finish(layers, moe, renamed=RENAMED)
    return replace(
        config,
        norm_eps=config.norm_eps / block**2,
        embedding_factor=embedding / block,
        logits_factor=1 / logits,
    )


def _read_experts(read: ConfigReader) -> MoeSpec:
    activation, shared = read.activation(), 0
    if read.raw("model_type") == "granitemoeshared":
        shared = read.count("shared_intermediate_size")
    return MoeSpec(
        num_experts=read.integer("num_local_experts"),
        intermediate_size=read.integer("intermediate_size"),
        activation=activation,
        router=RouterSpec(top_k=read.integer("num_experts_per_tok"), norm_topk_prob=True),
        shared=SharedExpertSpec(intermediate_size=shared, activation=activation, gated=False)
        if shared
        else None,
    )
