"""Rows through memory that the GPUs of a host share, by their copy engines beside the compute, without an SM.

The memory has the layout of `kernels.all2all.symm`. A rank packs its rows in place and copies them to every peer; the
stream signals the peers and waits for their signals. Sums over local experts return the same way, each to the rank of
its row, and `sum_partials` adds them.

Copies are faster while other work uses the SMs, so with `stream` set. Without a stream, or with few rows, the kernels
of `symm` run: alone they take 13 to 72 % less time on two H200, 13 % less for 8,192 rows.

T tokens of this rank, r ranks, N = r * T, D hidden, K experts per token, W bytes of a row, R permuted rows.
"""

import logging
import threading
from typing import Any

import torch

from kernels.all2all.base import ExpertInput
from kernels.all2all.comm_stream import StreamEvent, on_comm_stream
from kernels.all2all.payload import Gathered
from kernels.all2all.stream_signals import StreamSignals
from kernels.all2all.symm import SymmAllToAll
from kernels.host.owned import start_thread
from kernels.interface.backend import BackendShape
from kernels.pending import Pending
from kernels.routing.device_routing import DeviceRouting

logger = logging.getLogger(__name__)

RELEASE_S = 5e-4  # between two rounds of writes that end stream waits after an abort
KERNEL_ROWS = 256  # up to here kernels are as fast beside compute, on two H200


class CopyEngineAllToAll(SymmAllToAll):
    """Copies and stream memory operations; all ranks on one host. Building it is collective."""

    name = "copy_engine"
    auto = "GPUs of a host share memory: one kernel each way, beside another ubatch's compute no SM"
    sm_choices = ()  # copies use no SM

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        """Return the bytes of the sums of all ranks' rows, which peers do not write into."""
        row_bytes = shape.hidden_size * shape.dtype.itemsize
        return shape.num_ranks * shape.max_num_tokens * row_bytes

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.kernel_rows = KERNEL_ROWS
        # The words of the kernels come first.
        self._rows_here = StreamSignals(self._memory, 8 * self._num_ranks)
        self._sums_here = StreamSignals(self._memory, 12 * self._num_ranks)
        self._closing, self._abort_lock = threading.Event(), threading.Lock()
        self._releasing: threading.Thread | None = None

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        num_rows = x_TD.shape[0]
        if not self._copies(num_rows):
            return super().dispatch(x_TD, topk_idx_TK, topk_weights_TK)
        self._begin(num_rows)
        own = self._own(num_rows)
        rows_TW = self._gathered_rows(num_rows)[own]
        self._format.pack_into(rows_TW, x_TD, topk_idx_TK, topk_weights_TK)
        start = self._rows_at + own.start * self._format.row_bytes
        with on_comm_stream(self.stream):
            for peer in self._peers():
                place = self._memory.of(peer)[start : start + rows_TW.numel()]
                place.copy_(rows_TW.view(-1))
            self._rows_here.signal_and_wait(torch.cuda.current_stream())
        return self._permute(topk_idx_TK, StreamEvent(self.stream))

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        num_rows = len(handle.origin)
        if not self._copies(num_rows):
            return super().combine(y_RD, handle)
        from kernels.triton.weighted_sum import weighted_sum

        self._busy = False
        routing, own = handle.routing, self._own(num_rows)
        assert isinstance(routing, DeviceRouting)
        gathered_rTD = self._gathered_sums(num_rows)
        kept = (own.start, own.stop, gathered_rTD.flatten(0, 1))
        sums_ND = weighted_sum(y_RD, routing.permuted_idx_NK, handle.topk_weights_NK, kept)
        sums_rTD = sums_ND.view_as(gathered_rTD)
        size = sums_rTD[0].numel() * sums_rTD.element_size()
        start = self._sums_at + self._rank * size
        with on_comm_stream(self.stream):
            for peer in self._peers():
                sums = sums_rTD[peer].view(-1).view(torch.uint8)
                self._memory.of(peer)[start : start + size].copy_(sums)
            self._sums_here.signal_and_wait(torch.cuda.current_stream())
        event = StreamEvent(self.stream, sums_rTD)

        def finish() -> torch.Tensor:
            event.wait()
            return gathered_rTD

        return Pending(finish)

    def dispatch_buffer(self, num_rows: int) -> torch.Tensor | None:
        if not self._copies(num_rows):
            return None
        x_TD = self._format.x(self._gathered_rows(num_rows)[self._own(num_rows)])
        return x_TD if isinstance(x_TD, torch.Tensor) else None

    def abort(self) -> None:
        super().abort()
        with self._abort_lock:
            if self._releasing is None and not self._closing.is_set():
                self._releasing = start_thread(
                    self._release_waits, self._release_failed, "release-waits"
                )

    def _release_waits(self) -> None:
        """Let stream waits fall through, again and again: each one resets its words, and graphs hold many."""
        device = self._memory.local.device
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device, -1)  # type: ignore[no-untyped-call]
            while not self._closing.wait(RELEASE_S):
                self._rows_here.release(stream)
                self._sums_here.release(stream)
            stream.synchronize()

    def _release_failed(self, error: BaseException) -> None:
        # This rank cannot leave its epoch then: the supervisor replaces its process after cluster.hang_timeout_s.
        logger.error("waits of the GPU for peers do not end", exc_info=error)

    def close(self) -> None:
        self._closing.set()
        with self._abort_lock:
            if self._releasing is not None:
                self._releasing.join()
        del self._rows_here, self._sums_here
        super().close()

    def _copies(self, num_rows: int) -> bool:
        return self.stream is not None and num_rows > self.kernel_rows

    def _own(self, num_rows: int) -> slice:
        """Return the rows of this rank among the gathered rows."""
        return slice(self._rank * num_rows, (self._rank + 1) * num_rows)

    def _peers(self) -> list[int]:
        """Return all other ranks, the next one first, so that no two ranks copy to the same rank at once."""
        return [(self._rank + step) % self._num_ranks for step in range(1, self._num_ranks)]
