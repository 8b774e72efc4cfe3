"""LoRA adapters as PEFT saves them, and checkpoints into which they are merged."""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "use_dora": False,
    "lora_dropout": 0.05,
    "init_lora_weights": True,
}


def draw(name: str, *shape: int, seed: int = 0) -> torch.Tensor:
    number = sum(ord(letter) * (place + 1) for place, letter in enumerate(name)) + 7919 * seed
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def weight_shapes(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each matrix of a checkpoint, by the name of its module."""
    tensors = load_file(checkpoint / "model.safetensors")
    return {
        name.removesuffix(".weight"): (it.shape[0], it.shape[1])
        for name, it in tensors.items()
        if it.dim() == 2 and name.endswith(".weight")
    }


def make_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    prefix: str = "base_model.model.",
    **config: Any,
) -> Path:
    """Write a random adapter of these modules, named as in the model, with their outputs and inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (outputs, inputs) in modules.items():
        scale = 1 / math.sqrt(inputs)
        tensors[f"{prefix}{name}.lora_A.weight"] = draw(f"{name}A", rank, inputs, seed=seed) * scale
        tensors[f"{prefix}{name}.lora_B.weight"] = draw(f"{name}B", outputs, rank, seed=seed) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({name.rsplit(".", 1)[1] for name in modules})
    written = {**CONFIG, "r": rank, "lora_alpha": alpha, "target_modules": names, **config}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def merge(checkpoint: Path, adapter: Path, to: Path, *, prefix: str = "base_model.model.") -> Path:
    """Write the checkpoint with W + scale * B A in the place of each W, in float32, by PEFT's formula."""
    shutil.copytree(checkpoint, to)
    tensors, pairs = (
        load_file(checkpoint / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in pairs:
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(prefix).removesuffix(".lora_A.weight")
        a, b = pairs[name], pairs[name.replace("lora_A", "lora_B")]
        rank = len(a)
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + scale * (b @ a)
    save_file(tensors, to / "model.safetensors")
    return to


def chosen(
    shapes: Mapping[str, tuple[int, int]], endings: Iterable[str]
) -> dict[str, tuple[int, int]]:
    """The modules with these last parts of their names, in layers alone."""
    ends = tuple(f".{ending}" for ending in endings)
    return {name: it for name, it in shapes.items() if "layers." in name and name.endswith(ends)}


def make_fused_adapter(
    folder: Path,
    layers: Mapping[str, tuple[int, int, int]],
    *,
    swapped: bool,
    rank: int = 2,
    alpha: float = 8,
    seed: int = 0,
) -> Path:
    """Write a random adapter of all experts' parameters, as PEFT's `target_parameters` does.

    layers    number of experts, width and hidden size, by the module of each layer's experts
    swapped   as older versions of PEFT have parameters [E, outputs, inputs]: A has the outputs
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (experts, width, hidden) in layers.items():
        # The last parameter that was wrapped is the outermost.
        for path, (outputs, inputs) in (
            (f"{name}.base_layer", (2 * width, hidden)),
            (name, (hidden, width)),
        ):
            a_width, b_width = (outputs, inputs) if swapped else (inputs, outputs)
            a = draw(f"{path}A", experts * rank, a_width, seed=seed) / math.sqrt(inputs)
            b = draw(f"{path}B", b_width, rank * experts, seed=seed) * 0.3
            tensors[f"base_model.model.{path}.lora_A.weight"] = a
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    written = {**CONFIG, "r": rank, "lora_alpha": alpha, "target_modules": []}
    written["target_parameters"] = parameters
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def merge_fused(checkpoint: Path, adapter: Path, to: Path, *, swapped: bool) -> Path:
    """As `merge`, by PEFT's formula of parameters [E, outputs, inputs], or gpt-oss's [E, inputs, outputs]."""
    shutil.copytree(checkpoint, to)
    tensors = load_file(checkpoint / "model.safetensors")
    pairs = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    for name, a in pairs.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = pairs[name.replace("lora_A", "lora_B")]
        experts = len(a) // rank
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = a.reshape(experts, rank, -1), b.reshape(len(b), rank, experts)
        delta = torch.einsum("ore,eri->eio" if swapped else "ore,eri->eoi", b, a)
        delta = delta * (config["lora_alpha"] / rank)
        which = "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
        bare = module.removesuffix(".base_layer")
        stacked = f"{bare}.{which}"
        if stacked in tensors:  # gpt-oss has inputs before outputs
            tensors[stacked] = tensors[stacked] + delta.transpose(1, 2)
            continue
        for expert in range(experts):
            own = delta[expert]
            parts = {"down_proj": own}
            if which == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), own.chunk(2), strict=True))
            for part, values in parts.items():
                weight = f"{bare}.{expert}.{part}.weight"
                tensors[weight] = tensors[weight] + values
    save_file({name: it.contiguous() for name, it in tensors.items()}, to / "model.safetensors")
    return to


def add_embeddings(
    adapter: Path, vocab: int, hidden: int, *, seed: int = 0, bases: bool = False
) -> None:
    """Add adapters of embedding and head, as PEFT names them; bases: with the base model's own, as PEFT saves them."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    file, rank = adapter / "adapter_model.safetensors", config["r"]
    tensors, prefix = load_file(file), "base_model.model."
    embed, head = f"{prefix}model.embed_tokens", f"{prefix}lm_head"
    tensors[f"{embed}.lora_embedding_A"] = draw("embed A", rank, vocab, seed=seed)
    tensors[f"{embed}.lora_embedding_B"] = draw("embed B", hidden, rank, seed=seed) * 0.2
    tensors[f"{head}.lora_A.weight"] = draw("head A", rank, hidden, seed=seed) / math.sqrt(hidden)
    tensors[f"{head}.lora_B.weight"] = draw("head B", vocab, rank, seed=seed) * 0.2
    if bases:
        tensors[f"{embed}.base_layer.weight"] = torch.zeros(vocab, hidden)
    save_file(tensors, file)


def merge_embeddings(checkpoint: Path, adapter: Path, to: Path) -> Path:
    """As `merge`, with embedding and head: the merged model is not tied, because their adapters differ."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    pairs = load_file(adapter / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    shutil.copytree(checkpoint, to)
    tensors = load_file(checkpoint / "model.safetensors")
    prefix, embed = "base_model.model.", "model.embed_tokens.weight"
    tensors.setdefault("lm_head.weight", tensors[embed].clone())
    for name, a in pairs.items():
        module = name.removeprefix(prefix)
        if name.endswith("lora_embedding_A"):
            delta = (pairs[name.replace("_A", "_B")] @ a).t()
            tensors[embed] = tensors[embed] + scale * delta
        elif name.endswith(".lora_A.weight"):
            weight = module.replace(".lora_A.weight", ".weight")
            tensors[weight] = tensors[weight] + scale * (
                pairs[name.replace("lora_A", "lora_B")] @ a
            )
    save_file(tensors, to / "model.safetensors")
    model = json.loads((to / "config.json").read_text()) | {"tie_word_embeddings": False}
    (to / "config.json").write_text(json.dumps(model))
    return to
