"""Where a checkpoint's tensor goes in a model's fused parameters. Knows no model and no file.

A checkpoint's tensor may be in FP8 with scales or not, and so may the parameter: every slot takes both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.block_fp8 import BlockWeights, dequantise, quantise_blocks

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class WeightSlot:
    """A destination for one disk tensor.

    target      a view, of any strides, into a parameter
    disk_view   the disk tensor is viewed in this shape, which broadcasts to target's
    scale       factor on the values
    """

    target: torch.Tensor
    disk_view: tuple[int, ...]
    scale: float = 1.0

    @classmethod
    def plain(cls, target: torch.Tensor, scale: float = 1.0) -> "WeightSlot":
        """The disk tensor has the target's own shape."""
        return cls(target, tuple(target.shape), scale)

    @classmethod
    def interleaved(cls, target: torch.Tensor, head_dim: int) -> "WeightSlot":
        """Rows of whole heads, [heads * d, ...]: dims i and i + d/2 of a head come side by side."""
        rest = tuple(target.shape[1:])
        pairs = target.view(-1, head_dim // 2, 2, *rest).transpose(1, 2)
        return cls(pairs, tuple(pairs.shape))

    @classmethod
    def interleaved_per_head(cls, target_Nd: torch.Tensor, scale: float = 1.0) -> "WeightSlot":
        """One head's [d] values, interleaved likewise, for each of N heads."""
        num_heads, head_dim = target_Nd.shape
        pairs = target_Nd.view(num_heads, head_dim // 2, 2).transpose(1, 2)
        return cls(pairs, (1, 2, head_dim // 2), scale)

    @property
    def num_bytes(self) -> int:
        """Bytes of the destination."""
        return self.target.numel() * self.target.element_size()

    def fill(self, disk_tensor: torch.Tensor) -> None:
        """Copy, converting dtype and device."""
        self.target.copy_(disk_tensor.view(self.disk_view))
        if self.scale != 1.0:
            self.target.mul_(self.scale)

    def fill_blocks(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        """As `fill` with what FP8 values [N, K] and the scales of their blocks stand for."""
        self.fill(dequantise(values, scales))


@dataclass(frozen=True)
class BlockSlot:
    """A destination for one matrix that the model computes with in FP8."""

    target: BlockWeights

    @property
    def num_bytes(self) -> int:
        """Bytes of the destination."""
        return self.target.values.nbytes + self.target.scales.nbytes

    def fill(self, disk_tensor: torch.Tensor) -> None:
        """Round to FP8."""
        rounded = quantise_blocks(disk_tensor)
        self.fill_blocks(rounded.values, rounded.scales)

    def fill_blocks(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Copy as they are."""
        self.target.values.copy_(values)
        self.target.scales.copy_(scales)


Slot = WeightSlot | BlockSlot


class SlottedModel(Protocol):
    """A model that says where each disk tensor goes."""

    def weight_slots(self) -> Mapping[str, Slot]: ...
