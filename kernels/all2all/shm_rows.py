"""Rows in the slots of the `shm` all-to-all, by compiled C for float32 or by numpy.

For a decode step of 8 rows of 128 with two ranks the C code takes 20 us a layer, numpy's operators 60, torch's 100.

T tokens of this rank, r ranks, N rows of all ranks, D hidden, K experts per token, R routed rows.
"""

from abc import ABC, abstractmethod
from ctypes import CDLL, c_int64
from dataclasses import dataclass

import numpy as np
import torch

from kernels.all2all.base import ExpertInput
from kernels.all2all.payload import RowFormat
from kernels.native.library import load_or_none
from kernels.routing.permute import expert_bounds, route_numpy, sum_rows


@dataclass(frozen=True)
class Routed:
    """The handle of combine.

    row_R      gathered row of each routed row
    weight_R   weight of each routed row
    num_rows   N
    share      the rows of this rank among the N
    """

    row_R: torch.Tensor
    weight_R: torch.Tensor
    num_rows: int
    share: slice


@dataclass(frozen=True)
class Slots:
    """The slots of all ranks, dispatch uint8 [2, r, bytes] and combine uint8 [2, r, bytes], and this rank's part."""

    dispatch: np.ndarray
    combine: np.ndarray
    rank: int
    experts: range
    row_format: RowFormat
    max_num_tokens: int

    def share(self, counts: list[int]) -> slice:
        """Return the rows of this rank among the gathered rows; rank r has counts[r] rows."""
        start = sum(counts[: self.rank])
        return slice(start, start + counts[self.rank])


class SlotRows(ABC):
    """Reads and writes slots; `parity` selects one of the two sets."""

    def __init__(self, slots: Slots):
        self._slots = slots
        sums = torch.from_numpy(slots.combine).view(slots.row_format.dtype)
        per_rank = (*sums.shape[:2], -1, slots.row_format.hidden_size)
        self._sums_rND = sums.view(per_rank).unbind(0)
        self._own_sums_ND = [sums_rND[slots.rank] for sums_rND in self._sums_rND]
        self._codes_of = [_last_ids(slots_rB, slots) for slots_rB in slots.dispatch]

    @abstractmethod
    def put(
        self,
        parity: int,
        x_TD: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
    ) -> None:
        """Write this rank's rows."""

    @abstractmethod
    def take(self, parity: int, counts: list[int]) -> ExpertInput:
        """Return a copy of the rows of this rank's experts from all slots; rank r has counts[r] rows."""

    def put_sums(self, parity: int, y_RD: torch.Tensor, routed: Routed) -> None:
        """Write the weighted sums of this rank's experts for all N rows."""
        own_sums_ND = self._own_sums_ND[parity][: routed.num_rows]
        sum_rows(y_RD, routed.row_R, routed.num_rows, routed.weight_R, out=own_sums_ND)

    def _adapters(self, parity: int, counts: list[int], row_R: torch.Tensor) -> torch.Tensor | None:
        """Return the slot of the adapter of each routed row; None where rows carry none."""
        if not self._slots.row_format.adapters:
            return None
        slots_N = torch.from_numpy(-1 - _gather(self._codes_of[parity], counts))
        return slots_N.index_select(0, row_R)

    @abstractmethod
    def take_sums(self, parity: int, routed: Routed) -> torch.Tensor:
        """Return the sums of all ranks for this rank's rows, added: [T, D]."""


def _last_ids(slots_rB: np.ndarray, slots: Slots) -> list[np.ndarray]:
    """Return views of the last id of every row of each rank's dispatch slot, int32."""
    row_format = slots.row_format
    at = row_format.x_bytes + 4 * (row_format.top_k - 1)
    num_bytes = slots.max_num_tokens * row_format.row_bytes
    rows_rTW = slots_rB[:, :num_bytes].reshape(len(slots_rB), -1, row_format.row_bytes)
    return [rows_TW[:, at : at + 4].view(np.int32)[:, 0] for rows_TW in rows_rTW]


def slot_rows(slots: Slots) -> SlotRows:
    """Return the fastest SlotRows that can run here."""
    native = load_or_none() if slots.row_format.dtype == torch.float32 else None
    return NumpyRows(slots) if native is None else NativeRows(slots, native)


class NativeRows(SlotRows):
    """SlotRows for float32, in C."""

    def __init__(self, slots: Slots, native: CDLL):
        super().__init__(slots)
        self._native = native
        row_format = slots.row_format
        self._shape = row_format.top_k, row_format.x_bytes, row_format.row_bytes
        self._range = slots.experts.start, len(slots.experts)
        self._num_ranks = slots.dispatch.shape[1]
        self._slot_bytes = slots.dispatch.shape[2]
        self._rows = [parity.ctypes.data for parity in slots.dispatch]
        self._own_rows = [parity[slots.rank].ctypes.data for parity in slots.dispatch]
        self._sums = [parity.ctypes.data for parity in slots.combine]
        self._sums_stride = slots.combine.shape[2] // 4
        self._counts_type = c_int64 * self._num_ranks

    def put(
        self,
        parity: int,
        x_TD: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
    ) -> None:
        """See SlotRows."""
        x_TD, topk_idx_TK = x_TD.contiguous(), topk_idx_TK.contiguous()
        topk_weights_TK = topk_weights_TK.contiguous()
        assert topk_idx_TK.dtype == torch.int64 and topk_weights_TK.dtype == torch.float32
        self._native.pack_rows(
            x_TD.data_ptr(),
            topk_idx_TK.data_ptr(),
            topk_weights_TK.data_ptr(),
            x_TD.shape[0],
            *self._shape,
            self._own_rows[parity],
        )

    def take(self, parity: int, counts: list[int]) -> ExpertInput:
        """See SlotRows."""
        slots, native, rows = self._slots, self._native, self._rows[parity]
        num_rows = sum(counts)
        row_slot_2P = torch.empty(2, num_rows * self._shape[0], dtype=torch.int64)
        row_P, slot_P = row_slot_2P.unbind()
        weight_P = torch.empty(row_P.shape[0])
        offs_e = torch.empty(len(slots.experts), dtype=torch.int32)
        num_routed = native.route_rows(
            rows,
            self._slot_bytes,
            self._counts_type(*counts),
            self._num_ranks,
            *self._shape,
            *self._range,
            row_P.data_ptr(),
            slot_P.data_ptr(),
            weight_P.data_ptr(),
            offs_e.data_ptr(),
        )
        x_RD = torch.empty(num_routed, slots.row_format.hidden_size)
        native.take_rows(rows, slot_P.data_ptr(), num_routed, self._shape[1], x_RD.data_ptr())
        row_R = row_P[:num_routed]
        routed = Routed(row_R, weight_P[:num_routed], num_rows, slots.share(counts))
        return ExpertInput(x_RD, offs_e, routed, slots_N=self._adapters(parity, counts, row_R))

    def take_sums(self, parity: int, routed: Routed) -> torch.Tensor:
        """See SlotRows."""
        share, width = routed.share, self._slots.row_format.hidden_size
        out_TD = torch.empty(share.stop - share.start, width)
        start = self._sums[parity] + 4 * share.start * width
        self._native.sum_slots(
            start, self._sums_stride, self._num_ranks, out_TD.numel(), out_TD.data_ptr()
        )
        return out_TD


class _Fields:
    """The fields of one of the two sets of dispatch slots; row t of rank r is row r * max + t of `x`."""

    def __init__(self, slots_rB: torch.Tensor, row_format: RowFormat, max_num_tokens: int):
        x, topk_idx, topk_weights = row_format.fields(slots_rB.view(-1, row_format.row_bytes))
        assert isinstance(x, torch.Tensor), "rows in shared memory are in the model's dtype"
        self.x = x
        per_rank = (slots_rB.shape[0], max_num_tokens, -1)
        self.x_of = self.x.view(per_rank).unbind(0)
        self.topk_idx_of = list(topk_idx.view(per_rank).numpy())
        self.topk_weights_of = list(topk_weights.view(per_rank).numpy())


class NumpyRows(SlotRows):
    """SlotRows for any dtype, by numpy."""

    def __init__(self, slots: Slots):
        super().__init__(slots)
        row_format, max_num_tokens = slots.row_format, slots.max_num_tokens
        self._bounds = expert_bounds(slots.experts, "cpu", torch.int32).numpy()
        self._fields = [
            _Fields(slots_rB, row_format, max_num_tokens)
            for slots_rB in torch.from_numpy(slots.dispatch)
        ]
        num_ranks = slots.dispatch.shape[1]
        self._slot_of = list(np.arange(num_ranks * max_num_tokens).reshape(num_ranks, -1))

    def put(
        self,
        parity: int,
        x_TD: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
    ) -> None:
        """See SlotRows."""
        fields, rank, num_tokens = self._fields[parity], self._slots.rank, x_TD.shape[0]
        fields.x_of[rank][:num_tokens].copy_(x_TD)
        fields.topk_idx_of[rank][:num_tokens] = topk_idx_TK.numpy()
        fields.topk_weights_of[rank][:num_tokens] = topk_weights_TK.numpy()

    def take(self, parity: int, counts: list[int]) -> ExpertInput:
        """See SlotRows."""
        fields = self._fields[parity]
        pair_R, row_R, offs_e = route_numpy(_gather(fields.topk_idx_of, counts), self._bounds)
        weight_R = _gather(fields.topk_weights_of, counts).reshape(-1)[pair_R]
        slot_R = _gather(self._slot_of, counts)[row_R]
        routed = Routed(
            torch.from_numpy(row_R),
            torch.from_numpy(weight_R),
            sum(counts),
            self._slots.share(counts),
        )
        x_RD = fields.x.index_select(0, torch.from_numpy(slot_R))
        adapters_R = self._adapters(parity, counts, routed.row_R)
        return ExpertInput(x_RD, torch.from_numpy(offs_e), routed, slots_N=adapters_R)

    def take_sums(self, parity: int, routed: Routed) -> torch.Tensor:
        """See SlotRows."""
        sums_TD: torch.Tensor = self._sums_rND[parity][:, routed.share].sum(0)
        return sums_TD


def _gather(of: list[np.ndarray], counts: list[int]) -> np.ndarray:
    """Return the first `counts[r]` rows of each rank's array, concatenated."""
    return np.concatenate([rows[:count] for rows, count in zip(of, counts, strict=True)])
