"""Model folders with the layer sizes of published models, cut to a few layers, for random weights."""

from pathlib import Path
from typing import Any

from workers.weights.checkpoint import make_checkpoint

# The first layer is dense, all others have experts: in short models the published three would weigh too much.
DEEPSEEK_V3: dict[str, Any] = {
    "family": "deepseek_v3",
    "hidden_size": 7168,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "num_heads": 128,
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
SHAPES = {"deepseek-v3": DEEPSEEK_V3}


def model_folder(shape: str, num_layers: int, parent: Path, *, fp8: bool) -> Path:
    """Write config.json and a tokenizer; fp8: as a checkpoint with weights in FP8 blocks."""
    path = parent / f"{shape}-{num_layers}-layers{'-fp8' if fp8 else ''}"
    sizes = {**SHAPES[shape], "num_layers": num_layers, "dtype": "bfloat16"}
    return make_checkpoint(path, weights=False, fp8=fp8, **sizes)
