"""Reads config.json of OLMoE and maps its weights. Needs no torch; knows nothing of ranks or devices."""

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.specs.model import GqaSpec, LayerSpec, ModelConfig, MoeSpec, RouterSpec

DEFAULTS = {  # as transformers has them
    "rms_norm_eps": 1e-5,
    "norm_topk_prob": False,
}
NAMES = WeightNames()


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    heads, bias = read.integer("num_attention_heads"), read.boolean("attention_bias")
    head_dim = max(1, read.integer("hidden_size") // heads)
    read.fixed("head_dim", head_dim, None)  # transformers sizes the norms by it
    attention = GqaSpec(
        num_heads=heads,
        num_kv_heads=read.integer_or("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=read.rope(),
        qk_norm="full",
        qkv_bias=bias,
        output_bias=bias,
        clip_qkv=read.number_or_none("clip_qkv"),
    )
    router = RouterSpec(
        top_k=read.integer("num_experts_per_tok"), norm_topk_prob=read.boolean("norm_topk_prob")
    )
    moe = MoeSpec(
        num_experts=read.integer("num_experts"),
        intermediate_size=read.integer("intermediate_size"),
        activation=read.activation(),
        router=router,
    )
    layers = (LayerSpec(attention=attention, mlp=moe),) * read.integer("num_hidden_layers")
    return read.finish(layers, moe)
