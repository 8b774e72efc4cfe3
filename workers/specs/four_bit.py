"""How checkpoints pack matrices in four bits: the names and shapes of their tensors. Needs no torch.

N rows, K columns of a matrix.
"""

from dataclasses import dataclass
from enum import StrEnum

from kernels.four_bit_format import FourBitFormat

PER_WORD = 8  # codes of a 32-bit word


class Packing(StrEnum):
    """The order of codes in a checkpoint.

    MXFP4        gpt-oss: bytes of two neighbouring columns
    COMPRESSED   compressed-tensors' pack-quantized: words of neighbouring columns
    GPTQ         transposed, words of neighbouring columns; 0x11111111 is taken from words of zero points
    GPTQ_V2      as GPTQ, zero points as they are
    AWQ          transposed, words of neighbouring rows in AWQ's order
    """

    MXFP4 = "mxfp4"
    COMPRESSED = "pack-quantized"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    AWQ = "awq"


class DiskKind(StrEnum):
    """What a tensor of a checkpoint may hold; the values are dtypes as safetensors names them."""

    FLOAT = "floating point"
    SCALE = "floating point or F8_E8M0"
    FP8 = "F8_E4M3"
    BYTES = "U8"
    WORDS = "I32"
    INTEGERS = "I64"


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiskTensor:
    """A tensor of a checkpoint: the shapes that it may have, the usual one first, and its dtype."""

    shapes: tuple[Shape, ...]
    kind: DiskKind = DiskKind.FLOAT


@dataclass(frozen=True, slots=True)
class FourBitForm:
    """How a checkpoint packs a matrix, and how its codes stand for values."""

    packing: Packing
    format: FourBitFormat

    def tensors(self, name: str, rows: int, columns: int) -> dict[str, DiskTensor]:
        """Return the tensors of the matrix that is `name` [rows, columns] in an unpacked checkpoint, by name."""
        words, groups = DiskKind.WORDS, columns // self.format.group
        if self.packing == Packing.MXFP4:
            return {
                f"{name}_blocks": _of((rows, groups, self.format.group // 2), DiskKind.BYTES),
                f"{name}_scales": _of((rows, groups), DiskKind.BYTES),
            }
        if self.packing == Packing.COMPRESSED:
            found = {
                f"{name}_packed": _of((rows, columns // PER_WORD), words),
                f"{name}_scale": _of((rows, groups)),
            }
            if self.format.zeros:
                found[f"{name}_zero_point"] = _of((rows // PER_WORD, groups), words)
            if self.format.ordered:
                found[f"{name}_g_idx"] = _of((columns,), words)
            return found
        module = name.removesuffix(".weight")
        codes = (columns, rows // PER_WORD)
        if self.packing != Packing.AWQ:
            codes = (columns // PER_WORD, rows)
        found = {
            f"{module}.qweight": _of(codes, words),
            f"{module}.scales": _of((groups, rows)),
            f"{module}.qzeros": _of((groups, rows // PER_WORD), words),
        }
        if self.packing != Packing.AWQ:
            found[f"{module}.g_idx"] = _of((columns,), words)
        return found

    def unread(self, name: str) -> list[str]:
        """Return names of tensors beside the matrix that hold nothing more."""
        return [f"{name}_shape"] if self.packing == Packing.COMPRESSED else []

    def problem(self, rows: int, columns: int) -> str | None:
        """Return why no matrix of this shape is in this form, or None."""
        if columns % self.format.group:
            return f"{columns} columns are not whole groups of {self.format.group}"
        if rows % PER_WORD and self.packing != Packing.MXFP4:
            return f"{rows} rows are not a multiple of {PER_WORD}"
        return None


def _of(shape: Shape, kind: DiskKind = DiskKind.FLOAT) -> DiskTensor:
    return DiskTensor((shape,), kind)
