"""Reads of config.json that the families with gated delta nets share."""

from kernels.interface.linear_attention_spec import STATE_ITEM_BYTES, LinearAttentionSpec
from workers.models.config_reader import ConfigReader
from workers.specs.model import (
    GdnSpec,
    GqaSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    RouterSpec,
    SharedExpertSpec,
)

HYBRID_DEFAULTS = {"head_dim": 256, "full_attention_interval": 4}  # as transformers has them


def read_hybrid_layers(
    read: ConfigReader, *, norm_topk_prob: bool, dense: MlpSpec | None = None
) -> tuple[tuple[LayerSpec, ...], GqaSpec, MoeSpec]:
    """Return delta nets and gated full attention by `layer_types`, the full attention, and the experts of the layers.

    dense   takes the place of the experts where config.json has it so; None: every layer has experts
    """
    moe = _read_experts(read, norm_topk_prob)
    full, gdn = _read_attention(read), _read_gdn(read)
    kinds = read.linear_layers()
    with_experts = (True,) * len(kinds) if dense is None else read.layers_with_experts()
    layers = tuple(
        LayerSpec(
            attention=gdn if linear else full,
            mlp=moe if has_experts or dense is None else dense,
        )
        for linear, has_experts in zip(kinds, with_experts, strict=True)
    )
    return layers, full, moe


def _read_attention(read: ConfigReader) -> GqaSpec:
    heads, bias = read.integer("num_attention_heads"), read.boolean("attention_bias")
    head_dim = read.integer_or("head_dim", max(1, read.integer("hidden_size") // heads))
    rotary_dim = read.rotary_dim(head_dim, 0.25)
    read.fixed("attn_output_gate", True, None)
    read.fixed("use_sliding_window", False, None)
    read.ignore("sliding_window", "max_window_layers")
    return GqaSpec(
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=read.rope(),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        rotary_dim=rotary_dim,
        output_gate=True,
    )


def _read_gdn(read: ConfigReader) -> GdnSpec:
    key_heads, value_heads = (
        read.integer("linear_num_key_heads"),
        read.integer("linear_num_value_heads"),
    )
    if value_heads % key_heads:
        read.problems.append(
            f"linear_num_value_heads is {value_heads}; "
            f"expected a multiple of linear_num_key_heads ({key_heads})"
        )
    return GdnSpec(
        kernel_spec=LinearAttentionSpec(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_dim=read.integer("linear_key_head_dim"),
            value_dim=read.integer("linear_value_head_dim"),
            conv_width=read.integer("linear_conv_kernel_dim"),
            state_dtype=_read_state_dtype(read),
        )
    )


def _read_state_dtype(read: ConfigReader) -> str:
    """Return the dtype of the recurrent states: float32 where config.json has none, as transformers computes."""
    read.fixed("mamba_ssm_dtype", *STATE_ITEM_BYTES, None)
    return read.raw("mamba_ssm_dtype") or "float32"


def _read_experts(read: ConfigReader, norm_topk_prob: bool) -> MoeSpec:
    activation = read.activation()
    read.fixed("hidden_act", "silu")  # of the convolution of delta nets too
    return MoeSpec(
        num_experts=read.integer("num_experts"),
        intermediate_size=read.integer("moe_intermediate_size"),
        activation=activation,
        router=RouterSpec(top_k=read.integer("num_experts_per_tok"), norm_topk_prob=norm_topk_prob),
        shared=SharedExpertSpec(
            intermediate_size=read.integer("shared_expert_intermediate_size"),
            activation=activation,
            gated=True,
        ),
    )
