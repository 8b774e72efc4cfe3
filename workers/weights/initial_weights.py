"""Random weights: draws each tensor of a checkpoint, and fills a model without a checkpoint.

A tensor's values depend on (seed, name) and the kind of device alone, so every number of ranks holds the same model.
The values keep activations near 1 and finite in bfloat16 over many layers. Knows nothing of files.
"""

import math
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.routing.expert_map import ExpertMap
from workers.specs.model import ModelConfig
from workers.specs.weight_map import WeightEntry, WeightKind
from workers.weights.slots import Progress, Slot, SlottedModel
from workers.weights.tensors import rank_weights

NUM_BYTES = 256
LOGIT_STD = 3.0  # wide enough that the two best rarely lie within 1e-3
# Factors on 1 / sqrt(columns). Router logits are spread, so that rounding does not change the order of experts.
GAINS = {WeightKind.ROUTER: 1.5, WeightKind.DOWN_PROJECTION: 2.0}


@dataclass(frozen=True)
class Init:
    """mean + std * normal; rows from `weak_from` on are scaled by 0.05."""

    std: float
    mean: float = 0.0
    weak_from: int | None = None


def init_of(entry: WeightEntry, *, tied: bool) -> Init:
    """Return mean and deviation of a tensor; `tied`: the embedding is the head too."""
    kind = entry.kind
    if kind == WeightKind.HEAD or (tied and kind == WeightKind.EMBEDDING):
        # Ids beyond the bytes get small logits, because a random model would end by chance, which shortens the outputs
        # of a benchmark, or choose ids that decode to nothing.
        return Init(LOGIT_STD / math.sqrt(entry.columns), weak_from=NUM_BYTES)
    if kind == WeightKind.EMBEDDING:
        return Init(1.0)
    if kind in (WeightKind.NORM, WeightKind.QK_NORM):
        # not all equal, because tests must notice a loader that skips a norm
        return Init(0.1, mean=1.0 - entry.offset)
    if kind == WeightKind.BIAS:
        return Init(0.1)
    if kind == WeightKind.SINK:
        return Init(1.0)
    if kind == WeightKind.TOKEN_OFFSET:
        return Init(0.0)
    if kind == WeightKind.CONVOLUTION:
        return Init(1 / math.sqrt(entry.shape[-1]))
    if kind == WeightKind.POSITIONS:
        return Init(0.5)
    if kind == WeightKind.VISION:  # the product of patches has the channels in the place of columns
        return Init(1 / math.sqrt(math.prod(entry.shape[1:])))
    if kind == WeightKind.DECAY:
        return Init(1.5, mean=-2.0)  # some heads forget at once, others remember hundreds of tokens
    return Init(GAINS.get(kind, 1.0) / math.sqrt(entry.columns))


def draw(entry: WeightEntry, *, tied: bool, seed: int, generator: torch.Generator) -> torch.Tensor:
    """Return float32 values of the entry's shape on the generator's device, which is seeded anew.

    Of a part, the whole tensor is drawn.
    """
    init = init_of(entry, tied=tied)
    name = entry.key if entry.part is None else entry.name
    generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    tensor = torch.randn(entry.shape, generator=generator, device=generator.device)
    tensor.mul_(init.std).add_(init.mean)
    if init.weak_from is not None:
        tensor[init.weak_from :] *= 0.05
    return tensor


def draw_weights(
    model: SlottedModel,
    *,
    config: ModelConfig,
    expert_map: ExpertMap,
    rank: int,
    device: torch.device,
    progress: Progress | None = None,
    experts: Container[tuple[int, int]] | None = None,
) -> None:
    """Fill `model` with random weights drawn on `device`; `progress(done, total)` in bytes, after each tensor.

    experts   draw the tensors of these (layer, expert) alone
    """
    entries = rank_weights(config, expert_map, rank, experts=experts)
    draw_entries(entries, model.weight_slots(), config, device, progress=progress)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # the values of a large vocabulary in float32


def draw_entries(
    entries: Sequence[WeightEntry],
    slots: Mapping[str, Slot],
    config: ModelConfig,
    device: torch.device,
    *,
    progress: Progress | None = None,
) -> None:
    """Fill the slots of these entries, by their keys, on the current stream."""
    generator = torch.Generator(device)
    done, total = 0, sum(slots[entry.key].num_bytes for entry in entries)
    for entry in entries:
        slot, tied = slots[entry.key], config.tie_word_embeddings
        slot.fill(draw(entry, tied=tied, seed=0, generator=generator))
        done += slot.num_bytes
        if progress is not None:
            progress(done, total)
