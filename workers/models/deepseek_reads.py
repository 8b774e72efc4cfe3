"""Reads of config.json that the families of DeepSeek and GLM share. Needs no torch; knows nothing of weights."""

from dataclasses import replace

from kernels.interface.attention_spec import MlaDims
from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.models.mtp.weights import deepseek_names, with_mtp
from workers.models.rope_config import mscale
from workers.specs.model import (
    GdnSpec,
    GqaSpec,
    LayerSpec,
    MlaSpec,
    MlpSpec,
    ModelConfig,
    MoeSpec,
    RouterSpec,
    SharedExpertSpec,
)

# Keys of DeepSeek's own code for training and for its parallel layouts.
TRAINING_KEYS = ("aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux")
LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


def read_mla(read: ConfigReader) -> MlaSpec:
    """Return the latent attention of every layer."""
    heads, rope = read.integer("num_attention_heads"), read.rope()
    dims = MlaDims(
        rank=read.integer("kv_lora_rank"),
        rope_dim=read.integer("qk_rope_head_dim"),
        nope_dim=read.integer("qk_nope_head_dim"),
        value_dim=read.integer("v_head_dim"),
    )
    read.fixed("num_key_value_heads", heads, None)
    read.fixed(
        "head_dim", dims.rope_dim, None
    )  # transformers 5 saves the rotated part under this name
    read.fixed("qk_head_dim", dims.nope_dim + dims.rope_dim, None)
    read.fixed("rope_interleave", True, None)
    rope = replace(rope, interleaved=True)
    return MlaSpec(
        num_heads=heads,
        dims=dims,
        q_rank=read.integer_or("q_lora_rank", 0) or None,
        scale=(dims.nope_dim + dims.rope_dim) ** -0.5 * mscale(rope) ** 2,
        rope=rope,
        bias=read.boolean("attention_bias"),
        latent_eps=LATENT_EPS,
    )


def read_biased_router(read: ConfigReader) -> RouterSpec:
    """Return the router of DeepSeek-V3: the family alone decides that there is a bias for the choice."""
    read.fixed("scoring_func", "sigmoid", None)
    read.fixed("topk_method", "noaux_tc", None)
    return RouterSpec(
        top_k=read.integer("num_experts_per_tok"),
        norm_topk_prob=read.boolean("norm_topk_prob"),
        scoring_func="sigmoid",
        routed_scaling_factor=read.number("routed_scaling_factor"),
        bias=True,
        num_groups=read.integer("n_group"),
        topk_group=read.integer("topk_group"),
        group_score="top2",
    )


def read_experts(read: ConfigReader, router: RouterSpec) -> MoeSpec:
    """Return the experts, with shared experts as one of their summed width."""
    activation, width = read.activation(), read.integer("moe_intermediate_size")
    shared = read.integer("n_shared_experts") * width
    return MoeSpec(
        num_experts=read.integer("n_routed_experts"),
        intermediate_size=width,
        activation=activation,
        router=router,
        shared=SharedExpertSpec(intermediate_size=shared, activation=activation, gated=False),
    )


def read_layers(
    read: ConfigReader, attention: GqaSpec | MlaSpec, moe: MoeSpec
) -> tuple[LayerSpec, ...]:
    """Return all layers: the first ones have one dense MLP, all after them have experts."""
    read.fixed("moe_layer_freq", 1, None)
    dense = MlpSpec(intermediate_size=read.integer("intermediate_size"), activation=moe.activation)
    num_dense = read.count("first_k_dense_replace")
    return tuple(
        LayerSpec(attention=attention, mlp=dense if number < num_dense else moe)
        for number in range(read.integer("num_hidden_layers"))
    )


def finish_with_prediction(
    read: ConfigReader, layers: tuple[LayerSpec, ...], moe: MoeSpec, names: WeightNames
) -> ModelConfig:
    """Return the config, with the heads for multi-token prediction that follow the layers of the model."""
    count = read.count("num_nextn_predict_layers")
    heads = [deepseek_names(names, len(layers) + number) for number in range(count)]
    config = read.finish(layers, moe, skipped=tuple(head.root for head in heads))
    attention = layers[0].attention
    assert not isinstance(attention, GdnSpec), "all layers of these families attend"
    return with_mtp(config, attention, heads[0]) if heads else config
