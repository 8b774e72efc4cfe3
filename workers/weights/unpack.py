"""Unpacks matrices in four bits from the tensors of a checkpoint, one matrix at a time, on their device.

Four bytes of a 32-bit word hold eight codes, the first in the low bits of the first byte. N rows, K columns, S = K / G
groups of a row.
"""

from collections.abc import Callable

import torch

from kernels.four_bit import MIDDLE, FourBitMatrix, largest_exponent
from kernels.four_bit_format import FourBitFormat
from workers.specs.four_bit import FourBitForm, Packing

# Column of a word's eight that AWQ stores at each place, and the place of each column.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_PLACES = tuple(AWQ_ORDER.index(column) for column in range(8))
ONES = 0x11111111  # a word of eight codes 1
Tensors = list[torch.Tensor]


class PackedValuesError(ValueError):
    """Values of a packed tensor that stand for no weights; the message names no tensor."""


def unpack(form: FourBitForm, tensors: Tensors) -> FourBitMatrix:
    """Return the matrix of `tensors`, which have the order and shapes of `FourBitForm.tensors`.

    Raises PackedValuesError.
    """
    matrix = _UNPACKERS[form.packing](form.format, tensors)
    _check_scales(matrix.scales)
    return matrix


def _mxfp4(form: FourBitFormat, tensors: Tensors) -> FourBitMatrix:
    blocks_NSH, scales_NS = tensors
    return FourBitMatrix(form, _nibbles(blocks_NSH.flatten(1)), scales_NS)


def _compressed(form: FourBitFormat, tensors: Tensors) -> FourBitMatrix:
    """Zero points are packed along the rows."""
    packed_NW, scales_NS, *others = tensors
    zeros_NS = _words(others.pop(0).t()).t() if form.zeros else None
    order = _order(others.pop(0), form.group) if form.ordered else None
    return _ordered(FourBitMatrix(form, _words(packed_NW), _half(scales_NS), zeros_NS, order))


def _gptq(form: FourBitFormat, tensors: Tensors) -> FourBitMatrix:
    """ONES was taken from each word as a whole: behind a zero point 0 the next one of its word is less by a borrow."""
    packed_WN, scales_SN, zeros_SW, group_K = tensors
    return _gptq_v2(form, [packed_WN, scales_SN, zeros_SW + ONES, group_K])


def _gptq_v2(form: FourBitFormat, tensors: Tensors) -> FourBitMatrix:
    """Words hold eight columns of one row, or the zero points of eight rows."""
    packed_WN, scales_SN, zeros_SW, group_K = tensors
    zeros_NS = _words(zeros_SW).t()
    if not form.zeros and not bool((zeros_NS == MIDDLE).all()):
        raise PackedValuesError(f"sym is true, but zero points differ from {MIDDLE}")
    order = _order(group_K, form.group)
    if not form.ordered:
        _check_in_order(order)
    codes_NK = _words(packed_WN.t())
    zeros = zeros_NS if form.zeros else None
    return _ordered(
        FourBitMatrix(form, codes_NK, _half(scales_SN.t()), zeros, order if form.ordered else None)
    )


def _awq(form: FourBitFormat, tensors: Tensors) -> FourBitMatrix:
    packed_KW, scales_SN, zeros_SW = tensors
    codes_KN, zeros_SN = _awq_words(packed_KW), _awq_words(zeros_SW)
    return FourBitMatrix(form, codes_KN.t(), _half(scales_SN.t()), zeros_SN.t())


_UNPACKERS: dict[Packing, Callable[[FourBitFormat, Tensors], FourBitMatrix]] = {
    Packing.MXFP4: _mxfp4,
    Packing.COMPRESSED: _compressed,
    Packing.GPTQ: _gptq,
    Packing.GPTQ_V2: _gptq_v2,
    Packing.AWQ: _awq,
}


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., 2 B] of bytes [..., B], low bits first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., 8 W] of int32 [..., W]."""
    return _nibbles(packed.contiguous().view(torch.uint8))


def _awq_words(packed: torch.Tensor) -> torch.Tensor:
    places = torch.tensor(AWQ_PLACES, device=packed.device)
    return torch.unflatten(_words(packed), -1, (-1, 8)).index_select(-1, places).flatten(-2)


def _half(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float16: exact for float16, and for bfloat16 from 2 ** -17 to 65,280."""
    return scales.to(torch.float16)


def _order(group_K: torch.Tensor, group: int) -> torch.Tensor:
    """Return the columns sorted by their groups; each group must have `group` of them."""
    counts = torch.bincount(
        group_K.clamp(0, len(group_K) // group), minlength=len(group_K) // group
    )
    if int(group_K.min()) < 0 or not bool((counts == group).all()):
        raise PackedValuesError(f"g_idx does not give each group {group} columns")
    return group_K.argsort(stable=True).to(torch.int32)


def _ordered(matrix: FourBitMatrix) -> FourBitMatrix:
    """Return the matrix with its columns in the order of their groups."""
    if matrix.order is None:
        return matrix
    codes = matrix.codes.index_select(1, matrix.order)
    return FourBitMatrix(matrix.format, codes, matrix.scales, matrix.zeros, matrix.order)


def _check_in_order(order: torch.Tensor) -> None:
    if not torch.equal(order, torch.arange(len(order), dtype=order.dtype, device=order.device)):
        raise PackedValuesError("desc_act is false, but g_idx is not in order")


def _check_scales(scales: torch.Tensor) -> None:
    """Raise PackedValuesError for scales that stand for no finite weights, or that kernels cannot multiply by."""
    if scales.dtype == torch.uint8:
        largest = int(scales.max()) if scales.numel() else 0
        if largest > largest_exponent():
            raise PackedValuesError(
                f"it has the exponent {largest}; expected at most {largest_exponent()}, a scale of 2"
            )
    elif not bool(scales.isfinite().all()):
        raise PackedValuesError("it has scales that are infinite or not a number in float16")
