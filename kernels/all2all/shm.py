"""Rows through memory that all ranks of a host share: no sockets and no intermediate copies. CPU only.

Each rank publishes its rows in a slot, and its peers read the rows of their experts from the slot. Partial sums return
the same way, and the rank of a row adds them. Ranks may have different numbers of rows.

T tokens of this rank, D hidden, K experts per token, R routed rows.
"""

from typing import Self

import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.payload import RowFormat
from kernels.all2all.shm_rows import Routed, Slots, slot_rows
from kernels.host.shm import SharedMemoryGroup, segment_bytes, shared_memory_unavailable
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.pending import Pending


class ShmAllToAll(AllToAll):
    """Publishes rows, then reads the slots of all ranks. Uses both channels of the SharedMemoryGroup alone."""

    name = "shm"
    devices = ("cpu",)
    auto = "all ranks share a host: rows go through shared memory without a copy into sockets"
    one_host = True
    ubatch_shareable = (
        True  # its slots, laid out for whole steps, serve any number of dispatches in flight
    )
    no_overlap_reason = "the cores that compute copy the rows themselves"
    needs_process_group = False

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return shared_memory_unavailable()

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        return segment_bytes(shape.num_ranks, cls.shared_memory_slots(shape)) // shape.num_ranks

    @classmethod
    def shared_memory_slots(cls, shape: BackendShape) -> tuple[int, ...]:
        """Return the bytes of a rank's slots for dispatch and combine."""
        sum_bytes = shape.hidden_size * shape.dtype.itemsize
        return (
            shape.max_num_tokens * RowFormat.of(shape).row_bytes,
            shape.num_ranks * shape.max_num_tokens * sum_bytes,
        )

    @classmethod
    def build(cls, context: BackendContext) -> Self:
        assert context.shared_memory is not None, "shm needs a SharedMemoryGroup"
        return cls(
            context.shared_memory,
            context.local_slots,
            RowFormat.of(context.shape),
            context.shape.max_num_tokens,
        )

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
