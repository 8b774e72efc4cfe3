"""What a plan of attention over pages leaves for its layers, and where captured forwards read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PlannedLayers:
    """What the layers with one window read: where new rows go, where blocks are, and the chunks of decodes."""

    slots: torch.Tensor
    block_table: torch.Tensor
    chunks: Any  # kernels.triton.decode_merge.Chunks


@dataclass(frozen=True)
class PlannedPrompts:
    """Tiles of the sequences behind the decodes and of padding, rows and lengths of all sequences."""

    tiles: tuple[torch.Tensor, torch.Tensor]
    starts: torch.Tensor
    lens: torch.Tensor


@dataclass(frozen=True)
class GraphBuffers:
    """What captured forwards read, at fixed addresses; block table and slots of each window.

    max_seqs   sequences of a forward; one with prompts has its decodes in its first rows, up to this many
    """

    max_seqs: int
    integers: torch.Tensor
    block_tables: Mapping[int | None, torch.Tensor]
    slots: Mapping[int | None, torch.Tensor]
