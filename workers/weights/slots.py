"""Where a checkpoint's tensor goes in a model's fused parameters, by its entry in the weight map. Knows no file.

A checkpoint's tensor may be in FP8 with scales or packed in four bits, and so may the parameter: every slot takes all
kinds of tensors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from kernels.block_fp8 import BlockWeights, dequantise, num_blocks, quantise_blocks
from kernels.four_bit import FourBitMatrix, FourBitWeights, quantise_four_bit
from workers.specs.weight_map import WeightEntry, WeightKind

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class WeightSlot:
    """A destination for one disk tensor.

    target      a view, of any strides, into a parameter
    disk_view   the disk tensor is viewed in this shape, which broadcasts to target's
    scale       factor on the values
    offset      added to the values, before the factor
    part        the rows of the disk tensor that target gets, in the form of `WeightEntry.part`
    decay       the values become -exp(value)
    heads       (head_dim, rotary_dim): of each head of the disk tensor, the first rotary_dim values are paired
    """

    target: torch.Tensor
    disk_view: tuple[int, ...]
    scale: float = 1.0
    heads: tuple[int, int] | None = None
    offset: float = 0.0
    part: tuple[int, int, int] | None = None
    decay: bool = False

    @classmethod
    def plain(cls, target: torch.Tensor, scale: float = 1.0) -> "WeightSlot":
        """The disk tensor has the target's own shape."""
        return cls(target, tuple(target.shape), scale)

    @classmethod
    def rows(cls, target: torch.Tensor, entry: WeightEntry, scale: float) -> "WeightSlot":
        """A disk tensor of the target's shape, or of one row of it for every row; interleaved by `entry.head_dim`.

        A vector may be stored as a matrix of one row.
        """
        if entry.transposed or entry.interleaved:
            if entry.interleaved:
                target = torch.unflatten(target, 0, (2, -1)).transpose(0, 1)
            if entry.transposed:
                target = target.movedim(-1, 0)
            assert target.numel() == entry.size, (entry, target.shape)
            return cls(target, tuple(target.shape), scale)
        if entry.shape == (1, *target.shape):
            return cls(target, tuple(target.shape), scale)
        row_only = len(entry.shape) < target.dim()
        shape = tuple(target.shape[1:]) if row_only else tuple(target.shape)
        assert math.prod(shape) == entry.size, (entry, shape)
        decay = entry.kind == WeightKind.DECAY
        make = partial(cls, offset=entry.offset, part=entry.part, decay=decay)
        if not entry.head_dim or entry.rotary_dim:
            heads = (entry.head_dim, entry.rotary_dim) if entry.rotary_dim else None
            return make(target, (1, *shape) if row_only else shape, scale, heads)
        pair = (entry.head_dim // 2, 2)
        if row_only:
            pairs = target.view(len(target), *pair).transpose(1, 2)
            return make(pairs, (1, *pairs.shape[1:]), scale)
        pairs = target.view(-1, *pair, *shape[1:]).transpose(1, 2)
        return make(pairs, tuple(pairs.shape), scale)

    @property
    def num_bytes(self) -> int:
        """Bytes of the destination."""
        return self.target.numel() * self.target.element_size()

    def fill(self, disk_tensor: torch.Tensor) -> None:
        """Copy, converting dtype and device."""
        disk_tensor = take_part(disk_tensor, self.part)
        if self.heads is not None:
            disk_tensor = pair_rotary(disk_tensor, *self.heads)
        self.target.copy_(disk_tensor.view(self.disk_view))
        if self.decay:
            self.target.exp_().neg_()
        if self.offset:
            self.target.add_(self.offset)
        if self.scale != 1.0:
            self.target.mul_(self.scale)

    def fill_blocks(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Copy the product of FP8 values [N, K] and their scales, see `dequantise`."""
        self.fill(dequantise(values, scales))

    def fill_four_bit(self, matrix: FourBitMatrix) -> None:
        """Copy the values that the codes stand for."""
        self.fill(matrix.dequantise())


@dataclass(frozen=True)
class BlockSlot:
    """A destination for one matrix that the model holds in FP8.

    heads, part   as in WeightSlot, of entries that keep blocks
    """

    target: BlockWeights
    heads: tuple[int, int] | None = None
    part: tuple[int, int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the destination."""
        return self.target.values.nbytes + self.target.scales.nbytes

    def fill(self, disk_tensor: torch.Tensor) -> None:
        """Round to FP8 and copy."""
        rounded = quantise_blocks(disk_tensor)
        self.fill_blocks(rounded.values, rounded.scales)

    def fill_blocks(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Copy values with the scales of their blocks, or with one scale, unchanged; round others to blocks."""
        blocks = tuple(num_blocks(size) for size in values.shape)
        if scales.numel() > 1 and scales.shape != blocks:
            self.fill(dequantise(values, scales))
            return
        bits = take_part(values.view(torch.uint8), self.part)
        if self.heads is not None:
            bits = pair_rotary(bits, *self.heads)
        if self.part is not None and scales.shape == blocks:
            groups, first, end = self.part
            scales = take_part(scales, (groups, num_blocks(first), num_blocks(end)))
        self.target.values.copy_(bits.view(values.dtype))
        self.target.scales.copy_(scales)

    def fill_four_bit(self, matrix: FourBitMatrix) -> None:
        """Round to FP8 and copy."""
        self.fill(matrix.dequantise())


@dataclass(frozen=True)
class FourBitSlot:
    """A destination for one matrix that the model holds in four bits.

    interleaved   as in WeightEntry
    heads, part   as in WeightSlot
    """

    target: FourBitWeights
    interleaved: bool = False
    heads: tuple[int, int] | None = None
    part: tuple[int, int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the destination."""
        return self.target.nbytes

    def fill(self, disk_tensor: torch.Tensor) -> None:
        """Round to four bits and copy."""
        self.fill_four_bit(quantise_four_bit(disk_tensor, self.target.format))

    def fill_blocks(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Round FP8 values with scales to four bits and copy."""
        self.fill(dequantise(values, scales))

    def fill_four_bit(self, matrix: FourBitMatrix) -> None:
        """Copy codes and scales unchanged."""
        self.target.set(matrix.with_rows(self._order_rows))

    def _order_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if self.interleaved:
            return torch.cat((rows[::2], rows[1::2]))
        rows = take_part(rows, self.part)
        return rows if self.heads is None else pair_rotary(rows, *self.heads)


Slot = WeightSlot | BlockSlot | FourBitSlot


def take_part(tensor: torch.Tensor, part: tuple[int, int, int] | None) -> torch.Tensor:
    """Return the rows from `first` to `end` of each group of rows, for a part (groups, first, end); None: all rows."""
    if part is None:
        return tensor
    groups, first, end = part
    return tensor.view(groups, -1, *tensor.shape[1:])[:, first:end].flatten(0, 1)


def pair_rotary(heads: torch.Tensor, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Return a copy in which values i and i + rotary_dim / 2 of each head are neighbours, for the rotated ones."""
    values = heads.view(-1, head_dim, *heads.shape[1:])
    first, second = values[:, :rotary_dim].chunk(2, 1)
    rotated = torch.stack((first, second), 2).flatten(1, 2)
    return torch.cat((rotated, values[:, rotary_dim:]), 1).view(heads.shape)


class SlottedModel(Protocol):
    """A model with a destination for each tensor of the checkpoint, by name."""

    def weight_slots(self) -> Mapping[str, Slot]: ...


def parameter_of(model: Any, name: str) -> Any:
    """Return the parameter with this dotted path."""
    found = model
    for step in name.split("."):
        found = found[int(step)] if step.isdigit() else getattr(found, step)
    return found


def slot_of(model: Any, entry: WeightEntry, places: Mapping[tuple[int, int], int]) -> Slot:
    """Return the destination of `entry` in `model`; `places`: of (layer, expert) in the parameters of all experts."""
    found, scale = parameter_of(model, entry.parameter), 1.0
    if entry.kind in (WeightKind.NORM, WeightKind.QK_NORM):  # a norm, which may hold a multiple
        scale, found = found.load_scale, found.weight
    if entry.expert is not None:
        found = found[places[entry.layer, entry.expert]]
    if entry.rows is not None:
        found = found[slice(*entry.rows)]
    heads = (entry.head_dim, entry.rotary_dim or entry.head_dim) if entry.head_dim else None
    if isinstance(found, BlockWeights):
        return BlockSlot(found, heads, entry.part)
    if isinstance(found, FourBitWeights):
        return FourBitSlot(found, entry.interleaved, heads, entry.part)
    return WeightSlot.rows(found, entry, scale)
