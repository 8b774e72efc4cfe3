"""Reads config.json of gpt-oss and maps its weights. Needs no torch; knows nothing of ranks."""

from kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT
from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.specs.model import GqaSpec, LayerSpec, ModelConfig, MoeSpec, RouterSpec
from workers.specs.rope import RopeSpec

DEFAULTS = {  # as transformers has them
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_theta": 150_000.0,
    "attention_bias": True,
}
# transformers' rotary embedding where config.json has none.
ROPE = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
NAMES = WeightNames(router="router.weight", stacked_experts=True)


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    heads, bias = read.integer("num_attention_heads"), read.boolean("attention_bias")
    rope = read.rope()
    if read.raw("rope_parameters") is None and not read.raw("rope_scaling"):
        rope = RopeSpec(rope_type="yarn", rope_theta=rope.rope_theta, scaling=ROPE)
    experts = MoeSpec(
        num_experts=read.integer("num_local_experts"),
        intermediate_size=read.integer("intermediate_size"),
        activation="clamped_swiglu",
        router=RouterSpec(
            top_k=read.integer("num_experts_per_tok"), norm_topk_prob=True, logit_bias=True
        ),
        bias=True,
    )
    layers = tuple(
        LayerSpec(
            attention=GqaSpec(
                num_heads=heads,
                num_kv_heads=read.integer_or("num_key_value_heads", heads),
                head_dim=read.integer_or("head_dim", max(1, read.integer("hidden_size") // heads)),
                rope=rope,
                qkv_bias=bias,
                output_bias=bias,
                window=window,
                sinks=True,
            ),
            mlp=experts,
        )
        for window in read.windows()
    )
    read.fixed("hidden_act", "silu")
    read.fixed("swiglu_alpha", SWIGLU_ALPHA, None)
    read.fixed("swiglu_limit", SWIGLU_LIMIT, None)
    read.fixed("experts_per_token", experts.router.top_k, None)
    read.ignore("initial_context_length")  # the rotary embedding has it
    return read.finish(layers, experts, stacked_form=read.mxfp4())
