"""Random weights: how each tensor of a checkpoint is drawn, and a model filled with them in place of a checkpoint.

A tensor's values depend on (seed, name) and the kind of device alone, so every number of ranks holds the same model.
They keep activations near 1 and finite in bfloat16 over many layers. Knows nothing of files.
"""

import math
import zlib
from dataclasses import dataclass

import torch

from kernels.routing.placement import ExpertPlacement
from workers.models.qwen3_moe.config import Qwen3MoeConfig
from workers.weights.slots import Progress, SlottedModel
from workers.weights.tensors import rank_tensors

NUM_BYTES = 256
LOGIT_STD = 3.0  # wide enough that the two best rarely lie within 1e-3


@dataclass(frozen=True)
class Init:
    """mean + std * normal; rows from `weak_from` on are scaled by 0.05."""

    std: float
    mean: float = 0.0
    weak_from: int | None = None


def init_of(name: str, shape: tuple[int, ...], *, tied: bool) -> Init:
    """How the tensor of this Hugging Face name is drawn; `tied`: the embedding is the head too."""
    if name == "lm_head.weight" or (tied and name == "model.embed_tokens.weight"):
        # Ids that stand for no byte get small logits: a random model then neither ends by chance, which
        # keeps a benchmark's output lengths, nor names ids that decode to nothing.
        return Init(LOGIT_STD / math.sqrt(shape[1]), weak_from=NUM_BYTES)
    if name == "model.embed_tokens.weight":
        return Init(1.0)
    if name.endswith("norm.weight"):
        return Init(0.1, mean=1.0)  # not all ones: a loader that skips a norm must be caught
    if name.endswith(".bias"):
        return Init(0.1)
    # Spread router logits, so that the order of experts does not hang on rounding.
    gain = {"gate": 1.5, "down_proj": 2.0}.get(name.split(".")[-2], 1.0)
    return Init(gain / math.sqrt(shape[1]))


def draw(
    name: str, shape: tuple[int, ...], *, tied: bool, seed: int, generator: torch.Generator
) -> torch.Tensor:
    """float32 of this shape on the generator's device, which is seeded anew."""
    init = init_of(name, shape, tied=tied)
    generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    tensor = torch.randn(shape, generator=generator, device=generator.device)
    tensor.mul_(init.std).add_(init.mean)
    if init.weak_from is not None:
        tensor[init.weak_from :] *= 0.05
    return tensor


def draw_weights(
    model: SlottedModel,
    *,
    config: Qwen3MoeConfig,
    placement: ExpertPlacement,
    rank: int,
    device: torch.device,
    progress: Progress | None = None,
) -> None:
    """Fill `model` with random weights drawn on `device`; `progress(done, total)` in bytes, after each tensor.

    On CPU they are those of `phalanx make-checkpoint` for the same config.json.
    """
    generator = torch.Generator(device)
    shapes, slots = rank_tensors(config, placement, rank), model.weight_slots()
    done, total = 0, sum(slot.num_bytes for slot in slots.values())
    for name, slot in slots.items():
        tied = config.tie_word_embeddings
        slot.fill(draw(name, shapes[name], tied=tied, seed=0, generator=generator))
        done += slot.num_bytes
        if progress is not None:
            progress(done, total)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # a large vocabulary in float32
