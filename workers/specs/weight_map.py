"""One tensor of a checkpoint as data: its name and shape, the parameter it fills, and how. Needs no torch.

A family states its map once; loading, checks of file headers, random weights, FP8 and the memory estimate derive from
it. Knows nothing of files and of families.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from workers.specs.four_bit import DiskKind, DiskTensor, FourBitForm

FP8_BLOCK, FP8_SCALE_BYTES = 128, 4  # as in kernels.block_fp8, which needs torch


class WeightKind(StrEnum):
    """Purpose of a tensor. Decides how random values are drawn and whether FP8 checkpoints hold it in FP8."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    QK_NORM = "qk norm"
    BIAS = "bias"
    SINK = "sink"
    ROUTER = "router"
    GATE = "gate of a shared expert"
    CONVOLUTION = "convolution"
    DECAY = "decay"  # A_log, held as -exp(A_log)
    PROJECTION = "projection"
    DOWN_PROJECTION = "down projection"
    DRAFT_PROJECTION = "projection of a drafter's inputs"
    VISION = "matrix of the vision tower"  # which quantised checkpoints keep in 16 bits
    POSITIONS = "positions of the vision tower"
    TOKEN_OFFSET = "token offset"  # from a drafter's number of a token to the model's, integers


QUANTISABLE = frozenset({WeightKind.PROJECTION, WeightKind.DOWN_PROJECTION})


class Scaling(StrEnum):
    """Values of a matrix in FP8 that share a scale."""

    BLOCK = "block"  # 128 x 128 values, less at the edges
    CHANNEL = "channel"  # a row
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class Fp8Form:
    """How a checkpoint stores a matrix in FP8.

    suffix        ends the name of its scales, which begins with the name of the matrix
    input_scale   a scale of activations is stored too, which is not read
    """

    scaling: Scaling
    suffix: str
    input_scale: bool = False


def mapped_name(name: str, renamed: Iterable[tuple[str, str]]) -> str:
    """Return a name of a checkpoint as the weight map has it, see `ModelConfig.renamed`."""
    for part, mapped in renamed:
        name = name.replace(part, mapped)
    return name


class WeightEntry(NamedTuple):
    """One tensor of a checkpoint, or one expert's part of a tensor that holds all experts.

    A named tuple, because a model has up to 100,000 entries, and a dataclass takes three times as long to make.

    name, shape   in the checkpoint; of a stacked tensor the shape of one expert's part
    parameter     dotted path from the model to the parameter, with list indices: "layers.3.attention.qkv.weight"
    kind          its purpose
    rows          first row and end row in the parameter; None: all rows. A norm of one head fills every row
    head_dim      the rows (of a norm the values) are heads of this size; values i and i + head_dim / 2 come side
                  by side in the parameter; 0: in the order of the checkpoint
    rotary_dim    of each head only the first values, this many, come in such pairs; 0: all
    expert        the expert that owns it; its index in the parameter depends on the rank. None: no routed expert
    fp8           how the checkpoint holds it in FP8; None: in a floating dtype of 16 bits or more
    fused         name of the tensor that holds it for all experts, where the checkpoint has such tensors: [E, N, K],
                  or transposed [E, K, N], with `rows` of the N rows of each expert
    stacked       experts of the tensor, its first axis; 0: the tensor holds no more than this entry
    transposed    the checkpoint holds columns before rows
    interleaved   rows of gate and rows of up alternate in the checkpoint; the parameter holds all of gate first
    four_bit      how the checkpoint packs it in four bits; None: it does not
    part          (groups, first, end): the tensor's rows come in groups of equal size, and of each group the entry is
                  the rows from `first` to `end`; other entries of this name are the rest. None: all rows
    offset        added to the values
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    kind: WeightKind
    rows: tuple[int, int] | None = None
    head_dim: int = 0
    expert: int | None = None
    fp8: Fp8Form | None = None
    rotary_dim: int = 0
    fused: str = ""
    stacked: int = 0
    transposed: bool = False
    interleaved: bool = False
    four_bit: FourBitForm | None = None
    part: tuple[int, int, int] | None = None
    offset: float = 0.0

    @property
    def key(self) -> str:
        """A name for this entry alone."""
        if self.part is not None:
            return f"{self.name}[{self.part[1]}:{self.part[2]}]"
        return f"{self.name}[{self.expert}]" if self.stacked else self.name

    @property
    def layer(self) -> int:
        """The number of the layer in its model; the parameter belongs to one."""
        return int(self.parameter.split(".", 2)[1])

    @property
    def columns(self) -> int:
        """Values that one output sums over, of a matrix."""
        return self.shape[0 if self.transposed else 1]

    @property
    def disk(self) -> dict[str, DiskTensor]:
        """The tensors of the checkpoint that hold it, by name: one, or its values and their scales."""
        if self.four_bit is not None:
            found = self.four_bit.tensors(self.name, *self.shape)
        elif self.fp8 is None:
            integers = self.kind == WeightKind.TOKEN_OFFSET
            kind = DiskKind.INTEGERS if integers else DiskKind.FLOAT
            found = {self.name: DiskTensor((self.shape,), kind)}
        else:
            found = {
                self.name: DiskTensor((self.shape,), DiskKind.FP8),
                self.scale_name: DiskTensor(self.scale_shapes, DiskKind.SCALE),
            }
        if not self.stacked:
            return found
        return {
            name: DiskTensor(tuple((self.stacked, *shape) for shape in tensor.shapes), tensor.kind)
            for name, tensor in found.items()
        }

    @property
    def unread(self) -> list[str]:
        """Names of tensors beside it that a checkpoint may hold and no product needs."""
        if self.four_bit is not None:
            return self.four_bit.unread(self.name)
        return self.input_scale_names if self.fp8 is not None and self.fp8.input_scale else []

    @property
    def size(self) -> int:
        """Number of values."""
        if self.part is None:
            return math.prod(self.shape)
        return self.num_rows * math.prod(self.shape[1:])

    @property
    def num_rows(self) -> int:
        """Rows of the tensor that are the entry's."""
        if self.part is None:
            return self.shape[0]
        groups, first, end = self.part
        return groups * (end - first)

    @property
    def block_scale_shape(self) -> tuple[int, ...]:
        """Shape of one scale for each block, also for blocks cut at the edges."""
        return tuple(-(-size // FP8_BLOCK) for size in self.shape)

    @property
    def fp8_bytes(self) -> int:
        """Bytes in memory of the values in FP8 and the scales of their blocks."""
        blocks = (-(-size // FP8_BLOCK) for size in (self.num_rows, *self.shape[1:]))
        return self.size + FP8_SCALE_BYTES * math.prod(blocks)

    @property
    def four_bit_bytes(self) -> int:
        """Bytes in memory of the packed values; gate and up of an expert share an order of columns."""
        assert self.four_bit is not None, self.name
        form, columns = self.four_bit.format, self.shape[1]
        ordered = form.ordered and (self.rows is None or self.rows[0] == 0)
        return form.num_bytes(self.num_rows, columns) + (4 * columns if ordered else 0)

    @property
    def keeps_blocks(self) -> bool:
        """Whether its rows go to the parameter without leaving their blocks of scales."""
        if self.part is not None:
            groups, first, end = self.part
            if any(rows % FP8_BLOCK for rows in (self.shape[0] // groups, first, end)):
                return False
        if not self.head_dim or FP8_BLOCK % self.head_dim == 0:
            return True
        return self.head_dim % FP8_BLOCK == 0 and 0 < self.rotary_dim <= FP8_BLOCK

    @property
    def scale_name(self) -> str:
        """Name of its scales in the checkpoint."""
        assert self.fp8 is not None, self.name
        return self.name + self.fp8.suffix

    @property
    def scale_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes that its scales may have in the checkpoint, the usual one first."""
        assert self.fp8 is not None, self.name
        if self.fp8.scaling == Scaling.TENSOR:
            return (1,), (), (1, 1)
        if self.fp8.scaling == Scaling.CHANNEL:
            return (self.shape[0], 1), self.shape[:1]
        return (self.block_scale_shape,)

    @property
    def input_scale_names(self) -> list[str]:
        """Names of the scale of activations: of releases, of transformers, and of its scales of all experts."""
        module = self.name.removesuffix("weight")
        names = [f"{module}input_scale", f"{module}activation_scale"]
        return [*names, f"{self.fused}_activation_scale"] if self.fused else names
