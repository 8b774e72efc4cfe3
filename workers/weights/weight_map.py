"""One tensor of a checkpoint as data: its name and shape, the parameter it fills, and how. Needs no torch.

A family states its map once; loading, checks of file headers, random weights, FP8 and the memory estimate derive from
it. Knows nothing of files and of families.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

FP8_BLOCK, FP8_SCALE_BYTES = 128, 4  # as in kernels.block_fp8, which needs torch


class WeightKind(StrEnum):
    """Purpose of a tensor. Decides how random values are drawn and whether FP8 checkpoints hold it in FP8."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    QK_NORM = "qk norm"
    BIAS = "bias"
    ROUTER = "router"
    GATE = "gate of a shared expert"
    PROJECTION = "projection"
    DOWN_PROJECTION = "down projection"


QUANTISABLE = frozenset({WeightKind.PROJECTION, WeightKind.DOWN_PROJECTION})


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One tensor of a checkpoint.

    name, shape   in the checkpoint
    parameter     dotted path from the model to the parameter, with list indices: "layers.3.attention.qkv_QD"
    kind          its purpose
    rows          first row and end row in the parameter; None: all rows. A norm of one head fills every row
    head_dim      the rows (of a norm the values) are heads of this size; values i and i + head_dim / 2 come side
                  by side in the parameter; 0: in the order of the checkpoint
    rotary_dim    of each head only the first values, this many, come in such pairs; 0: all
    expert        the expert that owns it; its index in the parameter depends on the rank. None: no routed expert
    quantised     the checkpoint holds it in FP8, with a tensor of scales beside it
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    kind: WeightKind
    rows: tuple[int, int] | None = None
    head_dim: int = 0
    expert: int | None = None
    quantised: bool = False
    rotary_dim: int = 0

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales: one for each block, also for blocks cut at the edges."""
        return tuple(-(-size // FP8_BLOCK) for size in self.shape)

    @property
    def fp8_bytes(self) -> int:
        """Bytes of the values and scales in FP8."""
        return self.size + FP8_SCALE_BYTES * math.prod(self.scale_shape)
