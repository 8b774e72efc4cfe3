"""Rows through memory that the GPUs of a host share, by one Triton kernel each way, with a limit on SMs.

Row t of rank r is row r * T + t of every rank's memory, so nothing is counted and the host reads nothing. x is written
only to the ranks of the row's experts, ids and weights to all ranks. Each rank writes its sum over a row's local
experts to the rank of the row, which adds the sums.

One set of buffers is enough. A rank writes rows to a peer after it has received the peer's sums of the combine before,
so after the peer has read the earlier rows: a peer that adds sums reads none. A rank writes sums after it has received
the peer's next rows, so after the peer has added the earlier sums. Each direction needs one signal and no barrier.

T tokens of this rank, r ranks, N = r * T, D hidden, K experts per token, W bytes of a row, R permuted rows.
"""

from typing import Any

import torch
import torch.distributed as dist

from kernels.all2all.abort_word import AbortWord
from kernels.all2all.base import ExpertInput
from kernels.all2all.comm_stream import StreamEvent, on_comm_stream
from kernels.all2all.payload import Gathered, PayloadAllToAll, RowFormat, permute_local
from kernels.all2all.peer_memory import HEADER_BYTES, PeerMemory, peer_memory_unavailable
from kernels.interface.backend import BackendShape
from kernels.pending import Pending
from kernels.routing.device_routing import DeviceRouting
from kernels.routing.expert_map import ExpertMap
from kernels.routing.permute import Permutation

WARPS = 16  # of one SM, where SMs are limited
# Of one SM, where SMs are not limited: more rows at once, because a row waits for its places, then for its outputs.
FREE_WARPS = 28
VALUES_OF_A_WARP = 512


def peer_bytes(num_ranks: int, row_format: RowFormat, max_num_tokens: int) -> tuple[int, int]:
    """Return the bytes of the rows and of the sums that one rank receives."""
    rows = num_ranks * max_num_tokens
    sums = rows * row_format.hidden_size * row_format.dtype.itemsize
    return rows * row_format.row_bytes, -(-sums // 16) * 16


class SymmAllToAll(PayloadAllToAll):
    """Two kernels over symmetric memory; all ranks on one host. Building it is collective."""

    name = "symm"
    devices = ("cuda",)
    needs_equal_tokens = True
    one_host = True
    graph = True
    max_in_flight = 1
    sm_choices: tuple[int, ...] = (8, 16, 32)
    runs_on_stream = True

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return super().unavailable(device) or peer_memory_unavailable()

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        peer = peer_bytes(shape.num_ranks, RowFormat.of(shape), shape.max_num_tokens)
        return HEADER_BYTES + sum(peer)

    def __init__(
        self,
        group: dist.ProcessGroup,
        expert_map: ExpertMap,
        permutation: Permutation,
        row_format: RowFormat,
        device: torch.device,
        max_num_tokens: int,
    ):
        self._rank, self._num_ranks = group.rank(), group.size()
        self._format, self._permutation = row_format, permutation
        self._max_num_tokens = max_num_tokens
        row_bytes, sum_bytes = peer_bytes(self._num_ranks, row_format, max_num_tokens)
        self._memory = PeerMemory(group, device, row_bytes + sum_bytes)
        self._rows_at, self._sums_at = HEADER_BYTES, HEADER_BYTES + row_bytes
        new: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._starts = torch.tensor(expert_map.starts, **new)
        self._calls = torch.zeros(2, **new)
        self._abort = AbortWord(device)
        words = self._memory.local[: 8 * self._num_ranks].view(torch.int32)
        self._row_words, self._sum_words = words.chunk(2)
        self._all_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.set_num_sms(None)
        self._busy = False

    def set_num_sms(self, num_sms: int | None) -> None:
        """Set the programs of the kernels from the next call on; None for the programs that fill all SMs."""
        from kernels.triton.signals import MAX_PROGRAMS

        hidden = self._format.hidden_size
        warps = min(WARPS, max(1, hidden // VALUES_OF_A_WARP))
        warps = 1 << (warps - 1).bit_length()
        rows = WARPS // warps
        if num_sms is None:  # many small programs: a decode's rows get one each
            programs = max(1, FREE_WARPS // warps)
            limit, rows = min(MAX_PROGRAMS, self._all_sms * programs), 1
        else:  # an SM's worth of warps in each
            limit, warps = min(num_sms, self._all_sms), WARPS
        self._limit, self._rows, self._warps = limit, rows, warps

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        self._begin(x_TD.shape[0])
        inputs = x_TD.contiguous(), topk_idx_TK.contiguous(), topk_weights_TK.contiguous()
        with on_comm_stream(self.stream):
            self._push_rows(*inputs)
        return self._permute(inputs[1], StreamEvent(self.stream, inputs))

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        self._busy = False
        out_TD = y_RD.new_empty(len(handle.origin), y_RD.shape[1])
        with on_comm_stream(self.stream):
            self._push_sums(y_RD, handle, out_TD)
        event = StreamEvent(self.stream, y_RD, handle)

        def finish() -> torch.Tensor:
            event.wait()
            return out_TD

        return Pending(finish)

    def reset(self) -> None:
        self._busy = False

    def abort(self) -> None:
        self._abort.set()

    def close(self) -> None:
        # The memory stays mapped in each peer until the peer releases it.
        del self._memory, self._row_words, self._sum_words

    def _begin(self, num_rows: int) -> None:
        assert num_rows <= self._max_num_tokens, (num_rows, self._max_num_tokens)
        assert not self._busy, f"{self.name}: the last dispatch has no combine yet"
        self._busy = True

    def _gathered_rows(self, num_rows: int) -> torch.Tensor:
        """Return the gathered rows, uint8 [N, W], if each rank has num_rows."""
        width = self._format.row_bytes
        end = self._rows_at + self._num_ranks * num_rows * width
        return self._memory.local[self._rows_at : end].view(-1, width)

    def _gathered_sums(self, num_rows: int) -> torch.Tensor:
        """Return the sums of all ranks for this rank's rows: [r, T, D]."""
        width = self._format.hidden_size * self._format.dtype.itemsize
        end = self._sums_at + self._num_ranks * num_rows * width
        sums = self._memory.local[self._sums_at : end].view(self._format.dtype)
        return sums.view(self._num_ranks, num_rows, self._format.hidden_size)

    def _permute(self, topk_idx_TK: torch.Tensor, event: StreamEvent) -> Pending[ExpertInput]:
        """Return the input of this rank's experts; the handle's origin are the ids of this rank's rows."""

        def finish() -> ExpertInput:
            event.wait()
            fields = self._format.fields(self._gathered_rows(len(topk_idx_TK)))
            return permute_local(*fields, self._permutation, topk_idx_TK)

        return Pending(finish)

    def _push_rows(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> None:
        from kernels.triton.pdl import dependent_launch
        from kernels.triton.push_rows import push_rows_kernel

        num_rows = x_TD.shape[0]
        push_rows_kernel[self._grid(num_rows)](
            x_TD,
            topk_idx_TK,
            topk_weights_TK,
            self._memory.bases_r,
            self._starts,
            self._calls,
            self._row_words,
            self._abort.word,
            num_rows,
            self._rank,
            self._rows_at,
            0,
            IDS_AT=self._format.x_bytes,
            FP8=self._format.fp8,
            **dependent_launch(self._num_ranks * num_rows),
            **self._constants(),
        )

    def _push_sums(self, y_RD: torch.Tensor, handle: Gathered, out_TD: torch.Tensor) -> None:
        from kernels.triton.pdl import dependent_launch
        from kernels.triton.push_sums import push_sums_kernel

        routing, num_rows = handle.routing, out_TD.shape[0]
        assert isinstance(routing, DeviceRouting) and y_RD.is_contiguous()
        push_sums_kernel[self._grid(self._num_ranks * num_rows)](
            y_RD,
            routing.permuted_idx_NK,
            handle.origin,
            self._memory.local[self._rows_at :],
            self._gathered_sums(num_rows),
            self._memory.bases_r,
            self._starts,
            self._calls,
            self._sum_words,
            self._abort.word,
            out_TD,
            num_rows,
            self._rank,
            self._sums_at,
            4 * self._num_ranks,
            **dependent_launch(self._num_ranks * num_rows),
            **self._constants(),
        )

    def _grid(self, num_rows: int) -> tuple[int]:
        return (max(1, min(self._limit, -(-num_rows // self._rows))),)

    def _constants(self) -> dict[str, int]:
        hidden, top_k, x_bytes = self._format.hidden_size, self._format.top_k, self._format.x_bytes
        return {
            "HIDDEN": hidden,
            "TOP_K": top_k,
            "NUM_RANKS": self._num_ranks,
            "ROW_BYTES": self._format.row_bytes,
            "WEIGHTS_AT": x_bytes + 4 * top_k,
            "ROWS": self._rows,
            "BLOCK": 1 << (hidden - 1).bit_length(),
            "BLOCK_K": 1 << (top_k - 1).bit_length(),
            "num_warps": self._warps,
        }
