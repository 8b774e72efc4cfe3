"""Weights that stay in four bits in memory: one layout for every format. Plain torch, on any device.

Codes lie two a byte. Of each block of 64 columns, byte j holds the code of column j in its low bits and that of column
j + 32 in its high bits: all low bits of a tile are neighbours, so that a kernel takes both halves without moving values
between threads. Scales lie with rows innermost, because the threads of a kernel read neighbouring rows; in tiled MXFP4
the four scales of 128 columns of a row are one word, because copies to shared memory have at least 4 bytes.

N rows, K columns (a multiple of 64), G columns of a group; leading dimensions are those of the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional as F

from kernels.four_bit_format import FourBitFormat
from kernels.mxfp4 import EXPONENT_BIAS, dequantise_mxfp4, quantise_mxfp4

BLOCK, HALF = 64, 32  # columns of a block, and of the half in the low bits
TILE_BYTES = BLOCK * HALF
WORD = 4  # scales of MXFP4 in a word
MIDDLE = 8  # the zero point of formats without zero points
# Of one tile of 64 rows: warp, row of a group, column pair, tile of 16 columns, half of these, second 8 rows, column of
# the pair; and the place of each in the order of rows (warp, second 8, row) and columns (16, half, pair, column).
TILE_DIMS = (4, 8, 4, 2, 2, 2, 2)
ROWS_FIRST = (0, 2, 7, 3, 1, 5, 6, 4, 8)


@dataclass(frozen=True)
class FourBitMatrix:
    """One matrix with a code in each byte, the form between checkpoints and FourBitWeights.

    codes    uint8 [N, K], 0 to 15
    scales   [N, K / G]: float16, or the exponents of MXFP4 in uint8
    zeros    uint8 [N, K / G], None where the format has none
    order    int [K]: the input column that each column of codes multiplies; None: its own
    """

    format: FourBitFormat
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "FourBitMatrix":
        """Return the matrix with its rows as `change` of a tensor [N, any] leaves them."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros)

    def dequantise(self) -> torch.Tensor:
        """Return the values in float32 [N, K], columns in the order of the input. Exact."""
        if self.format.kind == "mxfp4":
            pairs = torch.unflatten(self.codes, 1, (-1, self.format.group))
            blocks = pairs[..., ::2] | pairs[..., 1::2] << 4
            return dequantise_mxfp4(blocks, self.scales)
        groups = torch.unflatten(self.codes.float(), 1, (-1, self.format.group))
        zeros = MIDDLE if self.zeros is None else self.zeros.float().unsqueeze(-1)
        values = ((groups - zeros) * self.scales.float().unsqueeze(-1)).flatten(1)
        if self.order is None:
            return values
        result = torch.empty_like(values)
        result[:, self.order.long()] = values
        return result


def quantise_four_bit(values_NK: torch.Tensor, form: FourBitFormat) -> FourBitMatrix:
    """Return a matrix of any floating dtype, each value rounded to the nearest that its group has."""
    if form.kind == "mxfp4":
        blocks, exponents = quantise_mxfp4(values_NK)
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
        return FourBitMatrix(form, codes, exponents)
    groups = torch.unflatten(values_NK.float(), 1, (-1, form.group))
    order = None
    if form.ordered:
        order = torch.arange(values_NK.shape[1], dtype=torch.int32, device=values_NK.device)
    if not form.zeros:
        scales = _positive(groups.abs().amax(-1) / 7)
        codes = (groups / scales.float().unsqueeze(-1)).round_().add_(MIDDLE).clamp_(0, 15)
        return FourBitMatrix(form, codes.to(torch.uint8).flatten(1), scales, None, order)
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    scales = _positive((high - low) / 15)
    zeros = (-low / scales.float()).round_().clamp_(0, 15)
    codes = (groups / scales.float().unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, 15)
    return FourBitMatrix(
        form, codes.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8), order
    )


def _positive(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float16, none of them 0."""
    return scales.clamp_(min=torch.finfo(torch.float16).tiny).to(torch.float16)


@dataclass(frozen=True)
class FourBitWeights:
    """Matrices in four bits, in the memory order that products read.

    values   uint8 [..., N, K / 2]; or tiled [..., N / 64, K / 64, 2048]: tiles of 64 x 64 in the order in which the
             threads of a tensor core's instruction hold them, 16 bytes a thread
    scales   [..., K / G, N]: float16, or the exponents of MXFP4 in uint8; of tiled MXFP4 [..., ceil(K / 128), N, 4]
    zeros    uint8 [..., K / G, N], None where the format has none
    order    int32 [..., K], see FourBitMatrix; None where columns are in order
    """

    format: FourBitFormat
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    tiled: bool

    @classmethod
    def empty(
        cls, form: FourBitFormat, *shape: int, device: torch.device | str, tiled: bool
    ) -> "FourBitWeights":
        """Return uninitialised matrices [..., N, K]; N is a multiple of 64 where tiled."""
        *lead, rows, columns = shape
        assert columns % BLOCK == 0 and not (tiled and rows % BLOCK), shape
        values = (rows // BLOCK, columns // BLOCK, TILE_BYTES) if tiled else (rows, columns // 2)
        groups = scales = (*lead, columns // form.group, rows)
        if tiled and form.kind == "mxfp4":
            scales = (*lead, -(-columns // (WORD * form.group)), rows, WORD)
        scale_dtype = torch.uint8 if form.kind == "mxfp4" else torch.float16
        new = partial(torch.empty, device=device)
        return cls(
            form,
            new((*lead, *values), dtype=torch.uint8),
            new(scales, dtype=scale_dtype),
            new(groups, dtype=torch.uint8) if form.zeros else None,
            new((*lead, columns), dtype=torch.int32) if form.ordered else None,
            tiled,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices, [..., N, K]."""
        *lead, rows, columns = self.values.shape[:-1] if self.tiled else self.values.shape
        return (*lead, rows * BLOCK, columns * BLOCK) if self.tiled else (*lead, rows, columns * 2)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that there are."""
        every = (self.values, self.scales, self.zeros, self.order)
        return [tensor for tensor in every if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy_(self, source: "FourBitWeights") -> None:
        """Copy matrices of the same shapes and format."""
        for target, found in zip(self.tensors, source.tensors, strict=True):
            target.copy_(found)

    def __getitem__(self, index: int | slice) -> "FourBitWeights":
        """Return a view of one matrix or a slice of several, or of rows of a single matrix, whole tiles if tiled."""
        if len(self.shape) > 2:
            zeros, order = (None if p is None else p[index] for p in (self.zeros, self.order))
            values, scales = self.values[index], self.scales[index]
            return FourBitWeights(self.format, values, scales, zeros, order, self.tiled)
        assert isinstance(index, slice), "rows of a matrix"
        rows = index
        if self.tiled:
            assert index.start % BLOCK == 0 and index.stop % BLOCK == 0, index
            rows = slice(index.start // BLOCK, index.stop // BLOCK)
        zeros = None if self.zeros is None else self.zeros[:, index]
        return replace(self, values=self.values[rows], scales=self.scales[:, index], zeros=zeros)

    def as_one_expert(self) -> "FourBitWeights":
        """Return a view of a single matrix [N, K] as matrices [1, N, K]."""
        zeros, order = (None if p is None else p[None] for p in (self.zeros, self.order))
        return replace(
            self, values=self.values[None], scales=self.scales[None], zeros=zeros, order=order
        )

    def set(self, matrix: FourBitMatrix) -> None:
        """Copy one matrix of the same shape and format."""
        assert matrix.format == self.format and tuple(matrix.codes.shape) == self.shape
        low, high = torch.unflatten(matrix.codes, 1, (-1, 2, HALF)).unbind(2)
        target = self._bytes()
        target.copy_((low | high << 4).view(target.shape))
        self._set_scales(matrix.scales)
        if self.zeros is not None:
            assert matrix.zeros is not None, matrix.format
            self.zeros.copy_(matrix.zeros.t())
        if self.order is not None:
            assert matrix.order is not None, matrix.format
            self.order.copy_(matrix.order)

    def matrix(self) -> FourBitMatrix:
        """Return a single matrix with a code in each byte."""
        rows, columns = self.shape
        packed = self._bytes().reshape(rows, columns // BLOCK, 1, HALF)
        codes = torch.cat((packed & 15, packed >> 4), 2).view(rows, columns)
        zeros = None if self.zeros is None else self.zeros.t()
        return FourBitMatrix(self.format, codes, self._scales(columns), zeros, self.order)

    def _set_scales(self, scales_NG: torch.Tensor) -> None:
        if self.scales.dim() == 2:
            self.scales.copy_(scales_NG.t())
            return
        rows, groups = scales_NG.shape
        words = F.pad(scales_NG, (0, -groups % WORD), value=EXPONENT_BIAS)
        self.scales.copy_(words.view(rows, -1, WORD).transpose(0, 1))

    def _scales(self, columns: int) -> torch.Tensor:
        """Return the scales of a single matrix, [N, K / G]."""
        if self.scales.dim() == 2:
            return self.scales.t()
        return self.scales.transpose(0, 1).flatten(1)[:, : columns // self.format.group]

    def _bytes(self) -> torch.Tensor:
        """Return a view of a single matrix's bytes, of several dimensions, in the order of rows, then columns."""
        if not self.tiled:
            return self.values.view(*self.values.shape[:-1], -1, HALF)
        tiles = self.values.view(*self.values.shape[:2], *TILE_DIMS)
        return tiles.permute(ROWS_FIRST)


def largest_exponent() -> int:
    """Return the largest exponent of MXFP4 that kernels take: they multiply by 2 ** 126 more, in bfloat16."""
    return EXPONENT_BIAS + 1
