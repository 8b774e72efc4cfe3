"""What random checkpoints of the families have in config.json beside sizes, the names of their sizes, their layout."""

from collections.abc import Mapping
from typing import Any, Literal

from workers.models.registry import FAMILIES

# Tensors of each expert, one of all experts [E, N, K], or that as [E, K, N].
ExpertLayout = Literal["apart", "fused", "transposed"]
_ONE_WIDTH = {
    "num_experts": "num_local_experts",
    "moe_intermediate_size": "intermediate_size",
    "intermediate_size": None,
}
_DELTA_NETS: dict[str, Any] = {
    "full_attention_interval": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 48,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "first_k_dense_replace": 1,
        "intermediate_size": 256,
        "kv_lora_rank": 32,
        "n_group": 2,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 1.5,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
        "v_head_dim": 24,
    },
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "intermediate_size": 256,
        "kv_lora_rank": 32,
        "n_group": 2,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 24,
    },
    "ernie4_5_moe": {
        "intermediate_size": 256,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "use_bias": False,
    },
    "glm4_moe": {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "intermediate_size": 256,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.5,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "glm4_moe_lite": {
        "first_k_dense_replace": 1,
        "intermediate_size": 256,
        "kv_lora_rank": 32,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 32,
    },
    "gpt_oss": {
        "attention_bias": True,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "sliding_window": 24,
        "swiglu_limit": 7.0,
    },
    "granitemoe": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 1.5,
        "residual_multiplier": 0.5,
        "rms_norm_eps": 1e-6,
    },
    "minimax_m2": {
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "mixtral": {"rms_norm_eps": 1e-5, "sliding_window": None},
    "glm4v_moe": {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "intermediate_size": 256,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        "routed_scaling_factor": 1.5,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "olmoe": {
        "attention_bias": False,
        "clip_qkv": None,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
    },
    "qwen2_moe": {
        "decoder_sparse_step": 1,
        "intermediate_size": 256,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
        "qkv_bias": True,
        "rms_norm_eps": 1e-6,
        "shared_expert_intermediate_size": 96,
    },
    "qwen3_5_moe": {**_DELTA_NETS, "partial_rotary_factor": 0.25},
    "qwen3_moe": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 64,
        "intermediate_size": 256,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
    },
    "qwen3_vl_moe": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "intermediate_size": 256,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
        },
    },
    "qwen3_next": {
        **_DELTA_NETS,
        "decoder_sparse_step": 1,
        "intermediate_size": 96,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    },
}
# Sizes under other names than Qwen3-MoE's, None where there is none.
_NAMES: dict[str, dict[str, str | None]] = {
    "deepseek_v2": {"num_experts": "n_routed_experts", "head_dim": None},
    "deepseek_v3": {"num_experts": "n_routed_experts", "head_dim": None},
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "glm4_moe": {"num_experts": "n_routed_experts"},
    "glm4_moe_lite": {"num_experts": "n_routed_experts", "head_dim": None},
    "glm4v_moe": {"num_experts": "n_routed_experts"},
    "gpt_oss": _ONE_WIDTH,
    "granitemoe": _ONE_WIDTH,
    "minimax_m2": _ONE_WIDTH,
    "mixtral": _ONE_WIDTH,
    "olmoe": {
        "moe_intermediate_size": "intermediate_size",
        "intermediate_size": None,
        "head_dim": None,
    },
    "qwen3_5_moe": {"intermediate_size": None},
}
_LAYOUTS: dict[str, ExpertLayout] = {
    "granitemoe": "fused",
    "qwen3_5_moe": "fused",
    "qwen3_vl_moe": "transposed",
}
_OF_IMAGES = {"image_token_id": 300, "video_token_id": 301}
_QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 48,
    "in_channels": 3,
    "intermediate_size": 80,
    "num_heads": 4,
    "num_position_embeddings": 36,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
# What a tower adds to config.json; `out_hidden_size` is that of the text part.
_VISION: dict[str, dict[str, Any]] = {
    "glm4v_moe": {
        "vision_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "depth": 3,
            "hidden_act": "silu",
            "hidden_size": 48,
            "image_size": 24,
            "in_channels": 3,
            "intermediate_size": 96,
            "model_type": "glm4v_moe_vision",
            "num_heads": 4,
            "patch_size": 4,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "qwen3_5_moe": {
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.5,
            "rope_theta": 1_000_000.0,
            "rope_type": "default",
        },
        "vision_config": _QWEN_VISION | {"model_type": "qwen3_5_moe"},
    },
    "qwen3_vl_moe": {
        "vision_config": _QWEN_VISION
        | {"deepstack_visual_indexes": [0, 2], "model_type": "qwen3_vl_moe"},
    },
}
# Of random checkpoints with a tower: values that no family has of its own.
PROCESSOR: dict[str, Any] = {
    "do_normalize": True,
    "do_rescale": True,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.25, 0.2],
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 2**16, "shortest_edge": 64},
}


def fields_of(family: str) -> dict[str, Any]:
    """Return fields of config.json beside sizes."""
    return _FIELDS[FAMILIES[family].folder]


def names_of(family: str) -> dict[str, str | None]:
    """Return the family's names of sizes where they differ."""
    return _NAMES.get(FAMILIES[family].folder, {})


def released_layout(family: str) -> ExpertLayout:
    """Return how releases of the family store experts."""
    return _LAYOUTS.get(FAMILIES[family].folder, "apart")


def vision_of(family: str, hidden_size: int) -> dict[str, Any]:
    """Return fields of config.json of a checkpoint with a vision tower, beside those of its text part."""
    found = _VISION[family] | _OF_IMAGES
    return found | {"vision_config": found["vision_config"] | {"out_hidden_size": hidden_size}}


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as releases have it, from one with the settings of the text part in its place."""
    if config["model_type"] not in _VISION:
        return dict(config)
    outer = {"architectures", "model_type", "dtype", "tie_word_embeddings", "quantization_config"}
    outer |= {"vision_config", *_OF_IMAGES}
    text = {key: value for key, value in config.items() if key not in outer}
    found = {key: value for key, value in config.items() if key in outer}
    text |= {"model_type": f"{config['model_type']}_text"}
    text |= {"tie_word_embeddings": config["tie_word_embeddings"]}
    return found | {"text_config": text}
