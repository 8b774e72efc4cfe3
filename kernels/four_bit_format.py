"""How weights in four bits stand for values, as data. Needs no torch; knows no checkpoint."""

from dataclasses import dataclass
from typing import Literal

GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class FourBitFormat:
    """The format of matrices of codes of four bits, with a scale for each group of a row's values.

    kind      mxfp4: a code is an e2m1 value, a scale a power of two (e8m0, one byte). int4: a code is a whole number
              from 0 to 15, of which the group's zero point is subtracted; a scale is float16
    group     neighbouring values of a row with one scale, one of GROUPS
    zeros     each group has a zero point of its own; False: 8 for all
    ordered   each matrix has an order of its input columns, in which the groups are neighbours (GPTQ's desc_act)
    """

    kind: Literal["mxfp4", "int4"]
    group: int
    zeros: bool = False
    ordered: bool = False

    def __str__(self) -> str:
        parts = [self.kind, f"groups of {self.group}"]
        parts += ["zero points"] if self.zeros else []
        parts += ["ordered columns"] if self.ordered else []
        return ", ".join(parts)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale."""
        return 1 if self.kind == "mxfp4" else 2

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix without its order of columns."""
        groups = rows * (columns // self.group)
        return rows * columns // 2 + groups * (self.scale_bytes + self.zeros)
