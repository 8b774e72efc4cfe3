"""Reads config.json of Mixtral and maps its weights. Needs no torch; knows nothing of ranks or devices."""

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.specs.model import GqaSpec, LayerSpec, ModelConfig, MoeSpec, RouterSpec

DEFAULTS = {  # as transformers has them
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
}
NAMES = WeightNames(
    moe="block_sparse_moe",
    expert_gate="experts.{}.w1.weight",
    expert_up="experts.{}.w3.weight",
    expert_down="experts.{}.w2.weight",
)
RENAMED = (
    (".mlp.", ".block_sparse_moe."),  # in transformers' own layout
    (".gate_proj.", ".w1."),  # and as llm-compressor writes experts
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    heads = read.integer("num_attention_heads")
    attention = GqaSpec(
        num_heads=heads,
        num_kv_heads=read.integer_or("num_key_value_heads", heads),
        head_dim=read.integer_or("head_dim", max(1, read.integer("hidden_size") // heads)),
        rope=read.rope(),
    )
    moe = MoeSpec(
        num_experts=read.integer("num_local_experts"),
        intermediate_size=read.integer("intermediate_size"),
        activation=read.activation(),
        router=RouterSpec(top_k=read.integer("num_experts_per_tok"), norm_topk_prob=True),
    )
    read.fixed("sliding_window", None)
    read.ignore("router_jitter_noise")  # of training
    layers = (LayerSpec(attention=attention, mlp=moe),) * read.integer("num_hidden_layers")
    return read.finish(layers, moe, renamed=RENAMED)
