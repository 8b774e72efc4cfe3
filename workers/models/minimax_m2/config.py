"""Reads config.json of MiniMax-M2 and maps its weights. Needs no torch; knows nothing of ranks or devices."""

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.specs.model import GqaSpec, LayerSpec, ModelConfig, MoeSpec, RouterSpec

DEFAULTS = {  # as transformers has them
    "rope_theta": 5_000_000.0,
}
NAMES = WeightNames(
    moe="block_sparse_moe",
    expert_gate="experts.{}.w1.weight",
    expert_up="experts.{}.w3.weight",
    expert_down="experts.{}.w2.weight",
    router_bias="e_score_correction_bias",
)
# Of layers that releases do not have, and of training.
IGNORED = (
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "router_jitter_noise",
    "shared_moe_mode",
    "use_mtp",
)
RENAMED = (
    (".mlp.", ".block_sparse_moe."),  # in transformers' own layout
    (".gate_proj.", ".w1."),  # and as llm-compressor writes experts
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    num_layers, head_dim = read.integer("num_hidden_layers"), read.integer("head_dim")
    rotary_dim = read.rotary_dim(head_dim, read.integer_or("rotary_dim", head_dim) / head_dim)
    attention = GqaSpec(
        num_heads=read.integer("num_attention_heads"),
        num_kv_heads=read.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=read.rope(),
        qk_norm="full",
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
    )
    router = RouterSpec(
        top_k=read.integer("num_experts_per_tok"),
        norm_topk_prob=True,
        scoring_func="sigmoid",
        bias=True,
    )
    moe = MoeSpec(
        num_experts=read.integer("num_local_experts"),
        intermediate_size=read.integer("intermediate_size"),
        activation=read.activation(),
        router=router,
    )
    read.fixed("attention_bias", False, None)
    read.fixed("attn_type_list", [1] * num_layers, None)
    read.fixed("qk_norm_type", "per_layer", None)
    read.fixed("scoring_func", "sigmoid", None)
    read.fixed("shared_intermediate_size", 0, None)
    read.fixed("sliding_window", None)
    read.fixed("use_qk_norm", True, None)
    read.fixed("use_routing_bias", True, None)
    read.ignore(*IGNORED)
    return read.finish(
        (LayerSpec(attention=attention, mlp=moe),) * num_layers, moe, renamed=RENAMED
    )
