"""Draws and writes the tensors of a random checkpoint, in one file or several.

Knows nothing of config.json's form and of how a rank loads the files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kernels.block_fp8 import MAX_E4M3, quantise_blocks
from tests.checkpoints.families import ExpertLayout
from tests.checkpoints.four_bit import pack
from workers.specs.model import ModelConfig, weight_map
from workers.specs.weight_map import Scaling, WeightEntry
from workers.weights.initial_weights import draw

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of the files: an entry of the weight map, or those of all experts as one, maybe transposed."""

    entries: tuple[WeightEntry, ...]
    fused: bool = False
    transposed: bool = False

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(math.prod(entry.shape) for entry in self.entries)

    def draw(self, config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
        """Return the tensor by its name, with its scales if it is in FP8."""
        drawn = [_draw(entry, config, seed) for entry in self.entries]
        if self.entries[0].stacked:
            return {
                name: torch.stack([tensors[name] for tensors in drawn])
                for name in self.entries[0].disk
            }
        if not self.fused:
            (found,) = drawn
            return found
        suffixes = ["", *([self.entries[0].fp8.suffix] if self.entries[0].fp8 else [])]
        result = {}
        for suffix in suffixes:
            experts: dict[int | None, list[torch.Tensor]] = {}
            for entry, tensors in zip(self.entries, drawn, strict=True):
                matrix = tensors[entry.name + suffix]
                matrix = matrix if matrix.dim() == 2 else matrix.view(1, 1)
                experts.setdefault(entry.expert, []).append(matrix)
            whole = torch.stack([torch.cat(parts) for parts in experts.values()])
            whole = whole.transpose(1, 2).contiguous() if self.transposed else whole
            result[self.entries[0].fused + suffix] = whole
        return result


def checkpoint_tensors(config: ModelConfig, layout: ExpertLayout) -> list[CheckpointTensor]:
    """Return all tensors of the files but scales, in the order of the forward."""
    fused: dict[str, list[WeightEntry]] = {}
    for entry in weight_map(config):
        if entry.part is not None and entry.name in fused:
            continue  # another part of a tensor that is drawn whole
        together = layout != "apart" and entry.fused
        fused.setdefault(entry.fused if together else entry.name, []).append(entry)
    return [
        CheckpointTensor(tuple(entries), len(entries) > 1, layout == "transposed")
        for entries in fused.values()
    ]


def write_weights(
    folder: Path,
    config: ModelConfig,
    all_tensors: Sequence[CheckpointTensor],
    num_shards: int,
    seed: int,
) -> dict[str, Any]:
    """Write one file, or several of about equal bytes, and return their index. Only one shard is in memory at once."""
    total = sum(tensor.size for tensor in all_tensors)
    shards: list[list[CheckpointTensor]] = [[] for _ in range(num_shards)]
    done, index = 0, 0
    for left, tensor in zip(range(len(all_tensors), 0, -1), all_tensors, strict=True):
        full = done >= total * (index + 1) / num_shards or left == num_shards - 1 - index
        if shards[index] and full and index + 1 < num_shards:
            index += 1
        shards[index].append(tensor)
        done += tensor.size
    files: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors"
        if num_shards > 1:
            file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        drawn: dict[str, torch.Tensor] = {}
        for tensor in shard:
            drawn |= tensor.draw(config, seed)
        save_file(drawn, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(drawn, file)
        num_bytes += sum(values.nbytes for values in drawn.values())
    return {"metadata": {"total_size": num_bytes}, "weight_map": files}


def _draw(entry: WeightEntry, config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return a tensor in the checkpoint's dtype by its name; or in FP8, with its scales."""
    tied = config.tie_word_embeddings
    tensor = draw(entry, tied=tied, seed=seed, generator=torch.Generator())
    if entry.four_bit is not None:
        return pack(entry, tensor, entry.four_bit)
    if entry.fp8 is None:
        return {entry.name: tensor.to(DTYPES[config.dtype])}
    if entry.fp8.scaling == Scaling.BLOCK:
        rounded = quantise_blocks(tensor)
        return {entry.name: rounded.values, entry.scale_name: rounded.scales}
    rows = entry.fp8.scaling == Scaling.CHANNEL
    amax = tensor.abs().amax(1, keepdim=True) if rows else tensor.abs().amax().view(1)
    scales = amax / MAX_E4M3
    return {entry.name: (tensor / scales).to(torch.float8_e4m3fn), entry.scale_name: scales}
