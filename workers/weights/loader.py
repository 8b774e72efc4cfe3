"""Fills a model straight from safetensors, reading only what this rank holds.

First every file's header is checked against the config, so that all that is wrong is named at once; then tensors are
read into the model's fused parameters. Knows nothing of what the tensors mean.
"""

from pathlib import Path

import torch

from kernels.routing.placement import ExpertPlacement
from workers.models.qwen3_moe.config import Qwen3MoeConfig
from workers.weights.files import (
    EMBEDDING,
    TIED_HEAD,
    CheckpointError,
    check_against_specs,
    check_tied_head,
    read_headers,
)
from workers.weights.quantization import SCALE_SUFFIX
from workers.weights.reader import SlotSource, fill_slots
from workers.weights.slots import Progress, SlottedModel
from workers.weights.tensors import rank_tensors, tensor_specs

__all__ = ["CheckpointError", "load_weights"]


def load_weights(
    model: SlottedModel,
    path: str | Path,
    *,
    config: Qwen3MoeConfig,
    placement: ExpertPlacement,
    rank: int,
    device: torch.device,
    progress: Progress | None = None,
) -> None:
    """Fill `model`, which is on `device`, from the checkpoint folder; `progress(done, total)` in bytes read.

    What is in FP8 on disk stays so where the model computes with FP8, and becomes the model's dtype elsewhere.
    CheckpointError names every missing, surplus or misshaped tensor, other ranks' included.
    """
    stored = read_headers(Path(path))
    tied_head = stored.pop(TIED_HEAD, None) if config.tie_word_embeddings else None
    specs = tensor_specs(config)
    check_against_specs(Path(path), stored, specs)
    slots = model.weight_slots()
    assert slots.keys() == rank_tensors(config, placement, rank).keys()
    sources = []
    for name, slot in slots.items():
        parts = [stored[name]]
        if specs[name].quantised:
            parts.append(stored[name + SCALE_SUFFIX])
        sources.append(SlotSource(slot, parts))
    fill_slots(sources, device, num_threads=torch.get_num_threads(), progress=progress)
    if tied_head is not None:
        check_tied_head(tied_head, stored[EMBEDDING])
