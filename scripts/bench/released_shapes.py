"""Model folders with the layer sizes of published models, whole or cut to a few layers, for random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.make_checkpoint import make_checkpoint

FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    # Releases keep a and b of delta nets in 16 bits.
    "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b", "in_proj_ba"],
}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8": FP8_BLOCKS,
    "mxfp4": {  # of gpt-oss's releases: the experts alone
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
            *("model.embed_tokens", "lm_head"),
        ],
    },
    "int4": {  # of GPTQ releases: symmetric, all projections but the routers'
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "damp_percent": 0.01,
        "checkpoint_format": "gptq",
    },
}
# The first layer is dense, all others have experts: in short models the published three would weigh too much.
DEEPSEEK_V3: dict[str, Any] = {
    "family": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GPT_OSS_120B: dict[str, Any] = {
    "family": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
GLM_4_5_AIR: dict[str, Any] = {
    "family": "glm4_moe",
    "num_hidden_layers": 46,
    "hidden_size": 4096,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10944,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
}
QWEN3_6_35B: dict[str, Any] = {  # of Qwen3.6-35B-A3B, the text part
    "family": "qwen3_5_moe_text",
    "num_hidden_layers": 40,
    "hidden_size": 2048,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
QWEN3_30B: dict[str, Any] = {  # of configs/models/qwen3-30b-a3b, for its FP8 release
    "family": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
}
QWEN3_6_VISION: dict[str, Any] = {  # the tower of Qwen3.6-35B-A3B
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SHAPES = {
    "qwen3-30b-a3b": QWEN3_30B,
    "deepseek-v3": DEEPSEEK_V3,
    "gpt-oss-120b": GPT_OSS_120B,
    "gpt-oss-20b": GPT_OSS_120B | {"num_hidden_layers": 24, "num_local_experts": 32},
    "glm-4.5-air": GLM_4_5_AIR,
    "qwen3.6-35b-a3b": QWEN3_6_35B,
}


def model_folder(
    shape: str, num_layers: int | None, parent: Path, quantization: str | None = None
) -> Path:
    """Write config.json and a tokenizer; None: all layers; quantization: as such a checkpoint, of QUANTIZATIONS."""
    sizes = {**SHAPES[shape], "dtype": "bfloat16"}
    if num_layers is not None:
        sizes["num_hidden_layers"] = num_layers
    name = f"{shape}-{sizes['num_hidden_layers']}-layers"
    if quantization is not None:
        sizes["quantization_config"] = QUANTIZATIONS[quantization]
        name += f"-{quantization}"
    return make_checkpoint(parent / name, weights=False, **sizes)


def with_tower(folder: Path, tower: Mapping[str, Any], sections: list[int]) -> Path:
    """Give the folder of a `qwen3_5_moe_text` a vision tower, as releases have it; return the folder.

    sections   pairs of a head that turn by time, row and column
    """
    file = folder / "config.json"
    text = json.loads(file.read_text(encoding="utf-8"))
    text["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "vision_config": {**tower, "out_hidden_size": text["hidden_size"]},
    }
    if (quantization := text.pop("quantization_config", None)) is not None:
        whole["quantization_config"] = quantization
    file.write_text(json.dumps(whole | {"text_config": text}, indent=2) + "\n", encoding="utf-8")
    return folder
