"""Fills a model straight from safetensors, reading only what this rank holds.

First every file's header is checked against the config, so that all that is wrong is named at once; then tensors are
read into the model's fused parameters. Knows nothing of what the tensors mean.
"""

from pathlib import Path

import torch

from kernels.routing.placement import ExpertPlacement
from workers.models.registry import weight_map
from workers.models.specs import ModelConfig
from workers.weights.files import (
    EMBEDDING,
    TIED_HEAD,
    CheckpointError,
    check_against_map,
    check_tied_head,
    read_headers,
)
from workers.weights.quantization import SCALE_SUFFIX
from workers.weights.reader import SlotSource, fill_slots
from workers.weights.slots import Progress, SlottedModel
from workers.weights.tensors import rank_weights

__all__ = ["CheckpointError", "load_weights"]


def load_weights(
    model: SlottedModel,
    path: str | Path,
    *,
    config: ModelConfig,
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
    check_against_map(Path(path), stored, weight_map(config))
    slots = model.weight_slots()
    sources = []
    for entry in rank_weights(config, placement, rank):
        parts = [stored[entry.name]]
        if entry.quantised:
            parts.append(stored[entry.name + SCALE_SUFFIX])
        sources.append(SlotSource(slots[entry.name], parts))
    fill_slots(sources, device, num_threads=torch.get_num_threads(), progress=progress)
    if tied_head is not None:
        check_tied_head(tied_head, stored[EMBEDDING])
