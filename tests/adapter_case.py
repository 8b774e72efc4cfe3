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
