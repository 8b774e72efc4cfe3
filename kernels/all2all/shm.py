"""Rows through memory that all ranks of a host share: no sockets, no copies in between.

Each rank publishes its rows; the others read what their experts need straight out of its slot. Partial
sums come back the same way and are added by the rank that owns the row. Ragged; CPU only.

T tokens of this rank, D hidden, K experts per token, R routed rows.
"""

import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.payload import RowFormat
from kernels.all2all.shm_rows import Routed, Slots, slot_rows
from kernels.host.shm import SharedMemoryGroup
from kernels.pending import Pending


class ShmAllToAll(AllToAll):
    """Publish, then read the others' slots. Both channels of the SharedMemoryGroup are its own."""

    name = "shm"

    def __init__(
        self,
        group: SharedMemoryGroup,
        experts: range,
        row_format: RowFormat,
        max_num_tokens: int,
    ):
        self._max_num_tokens = max_num_tokens
        self._dispatch, self._combine = dispatch, combine = group.channels
        self._rows = slot_rows(
            Slots(dispatch.slots, combine.slots, group.rank, experts, row_format, max_num_tokens)
        )

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        num_tokens = x_TD.shape[0]
        assert num_tokens <= self._max_num_tokens, (num_tokens, self._max_num_tokens)
        self._rows.put(self._dispatch.begin(), x_TD, topk_idx_TK, topk_weights_TK)
        return self._dispatch.publish(num_tokens, self._rows.take)

    def combine(self, y_RD: torch.Tensor, handle: Routed) -> Pending[torch.Tensor]:
        self._rows.put_sums(self._combine.begin(), y_RD, handle)
        return self._combine.publish(
            handle.num_rows, lambda parity, counts: self._rows.take_sums(parity, handle)
        )


def slot_bytes(num_ranks: int, row_format: RowFormat, max_num_tokens: int) -> tuple[int, int]:
    """The channels that ShmAllToAll needs of its SharedMemoryGroup: dispatch, combine."""
    sum_bytes = row_format.hidden_size * row_format.dtype.itemsize
    return max_num_tokens * row_format.row_bytes, num_ranks * max_num_tokens * sum_bytes
