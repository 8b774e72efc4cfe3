"""Writes small random checkpoints in every published layout.

Weights depend on (seed, tensor name) alone and equal those of `model.weights: dummy`, so neither shards, nor the layout
of experts, nor a change of transformers changes a value.
"""

import json
from pathlib import Path
from typing import Any

from scripts.byte_tokenizer import byte_tokenizer, generation_config, save_tokenizer
from tests.checkpoints.families import (
    PROCESSOR,
    ExpertLayout,
    fields_of,
    names_of,
    nested,
    released_layout,
    vision_of,
)
from tests.checkpoints.four_bit import FOUR_BITS
from tests.checkpoints.weights import checkpoint_tensors, write_weights
from workers.models.registry import DEFAULT_FAMILY, FAMILIES, parse_model_config

_TOKENS = {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256}
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    # Releases keep a and b of delta nets in 16 bits.
    "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b", "in_proj_ba"],
}

_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def _compressed(strategy: str) -> dict[str, Any]:
    """Return the `quantization_config` that llm-compressor writes."""
    values = {"num_bits": 8, "type": "float", "symmetric": True}
    blocks = [128, 128] if strategy == "block" else None
    weights = values | {"strategy": strategy, "dynamic": False, "block_structure": blocks}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": values | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8": _FP8 | {"fmt": "e4m3", "weight_block_size": [128, 128]},
    "fp8-tensor": _FP8,
    "compressed-tensor": _compressed("tensor"),
    "compressed-channel": _compressed("channel"),
    "compressed-block": _compressed("block"),
    "mxfp4": _MXFP4,
    **FOUR_BITS,
}


def make_checkpoint(
    path: str | Path,
    *,
    family: str = DEFAULT_FAMILY,
    num_layers: int = 4,
    hidden_size: int = 128,
    num_experts: int = 16,
    num_experts_per_tok: int = 4,
    moe_intermediate_size: int = 64,
    intermediate_size: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int = 512,
    max_position_embeddings: int = 4096,
    dtype: str = "float32",
    num_shards: int = 1,
    seed: int = 0,
    tie_word_embeddings: bool = False,
    weights: bool = True,
    fp8: bool = False,
    quantization: str | None = None,
    expert_layout: ExpertLayout | None = None,
    mtp: bool = False,
    vision: bool = False,
    **config_fields: Any,
) -> Path:
    """Write a random checkpoint of a model family to `path` and return the folder.

    `moe_intermediate_size` is the width of an expert, `intermediate_size` the width of the dense MLP of layers without
    experts; None, as of `head_dim` and `num_kv_heads`: the family's own. `config_fields` go into config.json as they
    are, e.g. `attention_bias=True`, `norm_topk_prob=False`, `rope_theta=1e4`, `rope_scaling={...}`.
    `quantization`: projections are stored in this form of QUANTIZATIONS ("mxfp4": gpt-oss's experts), all else in
    `dtype`; `fp8`: "fp8".
    `expert_layout`: None is that of the family's releases. Without `weights`: for `model.weights: dummy`.
    `mtp`: with the tensors of the head for multi-token prediction. `vision`: with a vision tower.
    """
    # Latent attention has a key of each query head in every release.
    kv_heads = num_heads if "kv_lora_rank" in fields_of(family) else 2
    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "moe_intermediate_size": moe_intermediate_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
    }
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "hidden_act": "silu",
        **fields_of(family),
    }
    for name, size in sizes.items():
        key = names_of(family).get(name, name)
        assert size is None or key is not None, f"{family} has no {name}"
        if size is not None:
            config[key] = size
    config |= {"dtype": dtype, "tie_word_embeddings": tie_word_embeddings, **_TOKENS}
    if "rope_parameters" not in config_fields:
        config["rope_theta"] = 1_000_000.0
    if fp8 or quantization:
        config["quantization_config"] = QUANTIZATIONS[quantization or "fp8"]
    if vision:
        config |= vision_of(family, hidden_size)
    config |= config_fields
    model = parse_model_config(config, {}, "config.json")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        layout = expert_layout or released_layout(family)
        tensors = checkpoint_tensors(model, layout)
        if mtp:
            assert model.mtp is not None, f"{family} has no head in this config"
            tensors += checkpoint_tensors(model.mtp, layout)
        index = write_weights(folder, model, tensors, num_shards, seed)
        if num_shards > 1:
            _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", nested(config))
    if vision:
        _write_json(folder / "preprocessor_config.json", PROCESSOR)
    _write_json(folder / "generation_config.json", generation_config(list(range(256, 259))))
    save_tokenizer(folder, byte_tokenizer(), model.max_position_embeddings)
    return folder


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
