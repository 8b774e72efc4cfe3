"""Reads config.json of Qwen3-MoE and maps its weights. Needs no torch; knows nothing of ranks or devices."""

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.specs.model import GqaSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec, RouterSpec

DEFAULTS = {  # as transformers has them
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
NAMES = WeightNames()


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    heads = read.integer("num_attention_heads")
    bias = read.boolean("attention_bias")
    attention = GqaSpec(
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads"),
        head_dim=read.integer_or("head_dim", max(1, read.integer("hidden_size") // heads)),
        rope=read.rope(),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
    )
    router = RouterSpec(
        top_k=read.integer("num_experts_per_tok"), norm_topk_prob=read.boolean("norm_topk_prob")
    )
    activation = read.activation()
    moe = MoeSpec(
        num_experts=_num_experts(read),
        intermediate_size=read.integer("moe_intermediate_size"),
        activation=activation,
        router=router,
    )
    dense = MlpSpec(intermediate_size=read.integer("intermediate_size"), activation=activation)
    read.fixed("use_sliding_window", False, None)
    read.fixed("use_qk_norm", True, None)
    read.ignore("sliding_window", "max_window_layers")
    layers = tuple(
        LayerSpec(attention=attention, mlp=moe if has_experts else dense)
        for has_experts in read.layers_with_experts()
    )
    return read.finish(layers, moe)


def _num_experts(read: ConfigReader) -> int:
    """transformers 5 writes `num_local_experts`, older versions `num_experts`."""
    old, new = read.raw("num_experts"), read.raw("num_local_experts")
    if old is not None and new is not None and old != new:
        read.problems.append(
            f"num_experts is {old!r} but num_local_experts is {new!r}; expected one number"
        )
    return read.integer("num_local_experts" if new is not None else "num_experts")
