"""What the command lines of measurements take: numbers, names, configurations, GPUs, model folders.

An input that cannot be used ends the command with one line.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import resolve_device, resolve_rank_config
from scripts.bench.released_shapes import FP8_BLOCKS
from workers.config import RankConfig


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the type of an option that takes some of these names."""
    names = tuple(known)

    def parse(text: str) -> list[str]:
        wanted = text.split(",")
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return wanted

    return parse


def counts(text: str) -> list[int]:
    """Return the numbers of `16,32`, ascending; none of an empty text."""
    found = text.split(",") if text else []
    if not all(part.isdecimal() and int(part) for part in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, as 16,32")
    return sorted(map(int, found))


def need_gpus(count: int, hint: str = "") -> None:
    """End the command if there are fewer GPUs; `hint` follows the message."""
    found = torch.cuda.device_count()
    if found < count:
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        raise SystemExit(f"needs {gpus}, found {found}{hint and f'; {hint}'}")


def server_config(path: Path, settings: Sequence[str]) -> PhalanxConfig:
    """Return a configuration with a GPU for each of its ranks, if they are on GPUs."""
    try:
        config = load_config(path, settings)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    if resolve_device(config) == "cuda":
        need_gpus(config.cluster.ranks, "--ranks, or --set cluster.device=cpu for a dry run")
    return config


def rank_config(path: Path, settings: Sequence[str]) -> RankConfig:
    """Return the configuration of each rank, as `server_config`."""
    config = server_config(path, settings)
    try:
        return resolve_rank_config(config)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


def model_copy(model: Path, copy: Path, *, layers: int | None = None, fp8: bool = False) -> Path:
    """Return a copy of a model's folder, with at most so many layers, as a checkpoint in FP8 blocks if `fp8`."""
    if not (model / "config.json").is_file():
        raise SystemExit(f"{model} has no config.json: expected the folder of a model")
    shutil.copytree(model, copy)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    if layers is not None:
        config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
    if fp8:
        config["quantization_config"] = FP8_BLOCKS
    path.write_text(json.dumps(config))
    return copy
