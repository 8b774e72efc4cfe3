"""Small checkpoints of every model family, in both spellings of config.json."""

import json
from pathlib import Path
from typing import Any

from workers.weights.checkpoint import make_checkpoint

# Two variants of each family: untied and tied embeddings, and each switch of the family in both positions.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
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
    "qwen3_moe": {
        "untied": {"norm_topk_prob": False},
        "tied": {"tie_word_embeddings": True, "attention_bias": True, "mlp_only_layers": [1]},
    },
}
CASES = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_experts": 10,  # divides by neither 3 nor 4 ranks
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}


def family_checkpoint(
    path: Path, family: str, variant: str, *, resaved: bool = False, num_files: int = 1
) -> Path:
    """Write a variant as the Hub has it, or `resaved` as transformers 5 writes it, in one file or about `num_files`."""
    folder = path / "hub"
    make_checkpoint(
        folder, family=family, num_shards=num_files, **SIZES | VARIANTS[family][variant]
    )
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    if not resaved:
        return folder
    from transformers import AutoModelForCausalLM

    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(path / "resaved", max_shard_size=num_bytes // num_files + 4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / "resaved" / name).write_bytes((folder / name).read_bytes())
    return path / "resaved"
