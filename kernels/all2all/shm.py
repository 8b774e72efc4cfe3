"""Rows through memory that all ranks of a host share: no sockets, no copies in between.

Each rank publishes its rows; the others read what their experts need straight out of its slot. Partial
sums come back the same way and are added by the rank that owns the row. Ragged; CPU only.

T tokens of this rank, r ranks, N rows of all ranks, D hidden, K experts per token, W bytes of a row,
R routed rows.
"""

from dataclasses import dataclass

import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.payload import Gathered, RowFormat, pick_local
from kernels.pending import Pending
from kernels.permute import expert_bounds
from kernels.shm import SharedMemoryGroup


@dataclass(frozen=True)
class _Share:
    """Where this rank's rows lie among all gathered rows."""

    start: int
    num_tokens: int


class _DispatchSlots:
    """One of the two sets of dispatch slots as tensors; rank r's row t is row r * max + t of `x`."""

    def __init__(self, slots_rB: torch.Tensor, row_format: RowFormat, max_num_tokens: int):
        num_ranks = slots_rB.shape[0]
        self.x, topk_idx, topk_weights = row_format.fields(slots_rB.view(-1, row_format.row_bytes))
        per_rank = (num_ranks, max_num_tokens)
        self.x_of = self.x.unflatten(0, per_rank).unbind(0)
        self.topk_idx_of = topk_idx.unflatten(0, per_rank).unbind(0)
        self.topk_weights_of = topk_weights.unflatten(0, per_rank).unbind(0)


class ShmAllToAll(AllToAll):
    """Publish, then read the others' slots. Two channels of a SharedMemoryGroup are its own."""

    name = "shm"

    def __init__(
        self,
        group: SharedMemoryGroup,
        experts: range,
        row_format: RowFormat,
        max_num_tokens: int,
    ):
        self._rank = group.rank
        self._max_num_tokens = max_num_tokens
        self._bounds = expert_bounds(experts, "cpu", torch.int32)
        self._dispatch, self._combine = group.channels
        self._rows = [
            _DispatchSlots(slots_rB, row_format, max_num_tokens)
            for slots_rB in torch.from_numpy(self._dispatch.slots)
        ]
        sums = torch.from_numpy(self._combine.slots).view(row_format.dtype)
        self._sums_2rND = sums.unflatten(2, (-1, row_format.hidden_size))
        ids = torch.arange(group.num_ranks * max_num_tokens)
        self._slot_rows_of = ids.view(group.num_ranks, max_num_tokens).unbind(0)

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        num_tokens = x_TD.shape[0]
        assert num_tokens <= self._max_num_tokens, (num_tokens, self._max_num_tokens)
        rows, rank = self._rows[self._dispatch.begin()], self._rank
        rows.x_of[rank][:num_tokens].copy_(x_TD)
        rows.topk_idx_of[rank][:num_tokens].copy_(topk_idx_TK)
        rows.topk_weights_of[rank][:num_tokens].copy_(topk_weights_TK)
        return self._dispatch.publish(num_tokens, self._read_rows)

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        sums_ND = handle.partial_sums(y_RD)
        num_rows = sums_ND.shape[0]
        self._sums_2rND[self._combine.begin(), self._rank, :num_rows].copy_(sums_ND)
        share: _Share = handle.origin
        rows = slice(share.start, share.start + share.num_tokens)
        return self._combine.publish(
            num_rows, lambda parity, counts: self._sums_2rND[parity, :, rows].sum(0)
        )

    def _read_rows(self, parity: int, counts: list[int]) -> ExpertInput:
        """Pick this rank's rows out of everybody's slots; copies all it needs."""
        rows = self._rows[parity]

        def gather(of: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return torch.cat([part[:count] for part, count in zip(of, counts, strict=True)])

        share = _Share(sum(counts[: self._rank]), counts[self._rank])
        return pick_local(
            rows.x,
            gather(rows.topk_idx_of),
            gather(rows.topk_weights_of),
            self._bounds,
            share,
            gather(self._slot_rows_of),
        )


def slot_bytes(num_ranks: int, row_format: RowFormat, max_num_tokens: int) -> tuple[int, int]:
    """The channels that ShmAllToAll needs of its SharedMemoryGroup: dispatch, combine."""
    sum_bytes = row_format.hidden_size * row_format.dtype.itemsize
    return max_num_tokens * row_format.row_bytes, num_ranks * max_num_tokens * sum_bytes
