"""Small checkpoints of every model family, in both spellings of config.json."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.checkpoints.writer import make_checkpoint

YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}
# Variants of each family: untied and tied embeddings, and each switch of the family in both positions.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v2": {
        "untied": {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        "tied": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
            "q_lora_rank": 48,
            "first_k_dense_replace": 0,
        },
        "open_groups": {"n_group": 5, "topk_group": 2, "attention_bias": True},
    },
    "deepseek_v3": {
        "untied": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "tied": {
            "tie_word_embeddings": True,
            "q_lora_rank": None,
            "n_group": 1,
            "attention_bias": True,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
        "open_groups": {
            "n_group": 5,
            "topk_group": 3,
            "attention_bias": True,
            "num_heads": 3,
            "first_k_dense_replace": 2,
        },
    },
    "ernie4_5_moe": {
        "untied": {"moe_num_shared_experts": 2, "tie_word_embeddings": False, "head_dim": 24},
        "tied": {"tie_word_embeddings": True, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
    },
    "glm4_moe": {
        "untied": {
            "attention_bias": False,
            "use_qk_norm": False,
            "head_dim": 24,
            "num_heads": 6,
            "num_kv_heads": 3,
        },
        "tied": {"tie_word_embeddings": True, "partial_rotary_factor": 0.25},
        "open_groups": {"n_group": 5, "topk_group": 2, "partial_rotary_factor": 1.0},
    },
    "glm4_moe_lite": {
        "untied": {},
        "tied": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "n_group": 5,
            "topk_group": 2,
            "q_lora_rank": None,
        },
    },
    "glm4v_moe": {
        "untied": {"vision": True},
        "tied": {"vision": True, "tie_word_embeddings": True, "attention_bias": False},
    },
    "granitemoe": {
        "untied": {"residual_multiplier": 0.22, "embedding_multiplier": 12},
        "tied": {"tie_word_embeddings": True, "attention_bias": True, "logits_scaling": 1},
    },
    "granitemoeshared": {
        "untied": {"shared_intermediate_size": 48, "attention_multiplier": 0.125},
        "tied": {"tie_word_embeddings": True, "shared_intermediate_size": 0},
    },
    "gpt_oss": {
        "untied": {"sliding_window": 9, "rope_scaling": YARN | {"truncate": False}},
        "tied": {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "head_dim": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        "mxfp4": {
            "quantization": "mxfp4",
            "sliding_window": 16,
            "num_heads": 6,
            "moe_intermediate_size": 64,  # kept in four bits
        },
    },
    "kimi_k2": {
        "untied": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "n_group": 1},
    },
    "minimax_m2": {
        "untied": {"num_heads": 3, "num_kv_heads": 1},
        "tied": {"tie_word_embeddings": True, "head_dim": 24, "rotary_dim": 10},
    },
    "mixtral": {
        "untied": {},
        "tied": {"tie_word_embeddings": True, "head_dim": 24, "hidden_act": "gelu"},
    },
    "olmoe": {
        "untied": {"clip_qkv": 0.5},
        "tied": {"tie_word_embeddings": True, "attention_bias": True, "norm_topk_prob": True},
    },
    "qwen2_moe": {
        "untied": {"decoder_sparse_step": 2},
        "tied": {
            "tie_word_embeddings": True,
            "qkv_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    },
    "qwen3_5_moe": {
        "untied": {},
        "tied": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
            "head_dim": 24,
        },
    },
    "qwen3_5_moe_text": {
        "untied": {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
        "all_linear": {"layer_types": ["linear_attention"] * 3},
    },
    "qwen3_moe": {
        "untied": {"norm_topk_prob": False},
        "tied": {"tie_word_embeddings": True, "attention_bias": True, "mlp_only_layers": [1]},
    },
    "qwen3_vl_moe": {  # of square matrices of experts transformers 5.23 knows no order
        "untied": {"vision": True, "moe_intermediate_size": 48},
        "tied": {
            "vision": True,
            "moe_intermediate_size": 48,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_only_layers": [1],
        },
    },
    "qwen3_next": {
        "untied": {"norm_topk_prob": False, "linear_conv_kernel_dim": 3, "num_kv_heads": 1},
        "tied": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_only_layers": [1],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
        },
        "all_full": {"layer_types": ["full_attention"] * 3, "partial_rotary_factor": 0.5},
    },
}
# Families that transformers knows under the name of another.
SAME_MODEL = {"kimi_k2": "deepseek_v3"}
CASES = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_experts": 10,  # divides by neither 3 nor 4 ranks
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}


def family_checkpoint(
    path: Path,
    family: str,
    variant: str,
    *,
    resaved: bool = False,
    num_files: int = 1,
    **changes: Any,
) -> Path:
    """Write a variant as the Hub has it, or `resaved` as transformers 5 writes it, in one file or about `num_files`."""
    folder = path / "hub"
    sizes = SIZES | VARIANTS[family][variant] | changes
    make_checkpoint(folder, family=family, num_shards=num_files, **sizes)
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    if not resaved:
        return folder
    from transformers import AutoConfig

    if VARIANTS[family][variant].get("quantization") == "mxfp4":
        # transformers 5.23 saves the experts that it has dequantised under the names of packed ones
        shutil.copytree(folder, path / "resaved")
        AutoConfig.from_pretrained(folder).save_pretrained(path / "resaved")
        return path / "resaved"
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    model = load_reference(folder)
    model.save_pretrained(path / "resaved", max_shard_size=num_bytes // num_files + 4096)
    if family in SAME_MODEL:
        saved = path / "resaved" / "config.json"
        saved.write_text(json.dumps(json.loads(saved.read_text()) | {"model_type": family}))
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        if (folder / name).exists():
            shutil.copy(folder / name, path / "resaved" / name)
    return path / "resaved"


def load_reference(folder: Path) -> Any:
    """Return transformers' model of a checkpoint in float32."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        Mxfp4Config,
    )

    options: dict[str, Any] = {"dtype": torch.float32}
    raw = json.loads((folder / "config.json").read_text())
    if raw["model_type"] in SAME_MODEL:
        raw["model_type"] = SAME_MODEL[raw["model_type"]]
        options["config"] = type(AutoConfig.for_model(raw["model_type"])).from_dict(raw)
    if raw.get("quantization_config", {}).get("quant_method") == "mxfp4":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    kind = AutoModelForImageTextToText if "vision_config" in raw else AutoModelForCausalLM
    model = kind.from_pretrained(folder, **options).eval()
    if set(getattr(model.config, "layer_types", None) or ()) == {"linear_attention"}:
        # transformers 5.23 has no length of a cache without attention
        model.config.use_cache = model.generation_config.use_cache = False
    return model
