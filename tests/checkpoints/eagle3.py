"""Writes small random EAGLE-3 draft models in both published layouts."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints.weights import checkpoint_tensors
from workers.models.eagle3.config import AUX_LAYERS, LAYER_CONFIG, parse_eagle3_config
from workers.specs.model import ModelConfig

SIZES: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 320,
}
OUTPUTS = [0, 1, 2]  # layers of the target, by their outputs


def eagle3_config(layout: str, **changes: Any) -> dict[str, Any]:
    """Return a config.json in the layout of EAGLE's releases ("eagle"), or of the speculators library."""
    own = {"draft_vocab_size": 100} | changes
    if layout == "eagle":
        ids = own.pop(AUX_LAYERS, OUTPUTS)
        eagle = {AUX_LAYERS: ids, "use_aux_hidden_state": True}
        found = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        return {**found, **SIZES, "torch_dtype": "float32", "eagle_config": eagle, **own}
    layer = SIZES | own.pop(LAYER_CONFIG, {})
    layer |= {key: own.pop(key) for key in list(own) if key in SIZES}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        AUX_LAYERS: [layer + 1 for layer in OUTPUTS],
        "dtype": "float32",
        LAYER_CONFIG: {"model_type": "llama", **layer},
        **own,
    }


def make_eagle3(
    path: Path,
    target: ModelConfig,
    layout: str = "eagle",
    *,
    without: tuple[str, ...] = (),
    extra: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> Path:
    """Write a draft model for `target` without some tensors; `changes` are keys of config.json."""
    raw = eagle3_config(layout, **changes)
    eagle = parse_eagle3_config(raw, target, None, "config.json")
    tensors: dict[str, torch.Tensor] = {}
    for tensor in checkpoint_tensors(eagle.model, "apart"):
        tensors |= tensor.draw(eagle.model, seed=1)
    size, vocab_size = eagle.draft_vocab_size, eagle.model.vocab_size
    if eagle.maps_tokens:
        chosen = torch.linspace(0, vocab_size - 1, size).long()
        tensors["d2t"] = chosen - torch.arange(size)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in without}
    if layout != "eagle":
        tensors = {
            name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
        }
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors | (extra or {}), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(raw))
    return path
