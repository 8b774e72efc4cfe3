"""The seam between the router and the experts: dispatch rows to experts, combine their answers.

T tokens of this rank, D hidden, K experts per token, R routed rows on this rank, e local experts, N rows
that came here, M rows an expert has room for, S scales of a row.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from kernels.all2all.comm_stream import CommStream
from kernels.backends.backend import Backend, BackendShape
from kernels.backends.context import BackendContext
from kernels.host.triton_version import triton_unavailable
from kernels.pending import Pending
from kernels.routing.device_routing import DeviceRouting, routing_in_order

Layout = Literal["contiguous", "masked"]


def sum_partials(sums: torch.Tensor) -> torch.Tensor:
    """[T, D] of what `combine` gives: parts [P, T, D] are added in float32."""
    return sums if sums.dim() == 2 else sums.sum(0, dtype=torch.float32).to(sums.dtype)


@dataclass(frozen=True)
class ExpertInput:
    """Rows for this rank's experts, grouped by local expert in ascending order: the `contiguous` layout.

    x_RD      rows in the model's dtype; one per (token, local expert) pair. With `routing`, the rows
              as they came, [N, D], each once: the product fetches them, or asks for `in_order`
    offs_e    int32 on x_RD's device: end of each local expert's rows (exclusive prefix ends);
              equal neighbours mean an expert without rows, and offs_e[-1] is how many there are:
              R, or with `routing` at most R
    handle    what `combine` of the same backend needs; opaque to everybody else
    routing   on GPUs: which row goes where, known to the device alone
    """

    x_RD: torch.Tensor
    offs_e: torch.Tensor
    handle: Any
    routing: DeviceRouting | None = None

    def in_order(self) -> torch.Tensor:
        """The rows in expert order; with `routing` each at its places, what lies at others is undefined."""
        if self.routing is None:
            return self.x_RD
        from kernels.triton.scatter_rows import scatter_rows

        return scatter_rows(self.x_RD, self.routing.permuted_idx_NK, self.routing.num_places)

    def places(self) -> DeviceRouting:
        """`routing`, or that of rows which are in order already."""
        return self.routing or routing_in_order(self.offs_e, self.x_RD.shape[0])


@dataclass(frozen=True)
class MaskedInput:
    """Rows for this rank's experts, each expert's in its own array: the `masked` layout.

    x_eMD       rows in the model's dtype, or e4m3 with scales
    scale_eMS   float32 scale of each 128 values of e4m3 rows, an expert's M contiguous; else None
    counts_e    int32: how many of the M each expert has; what lies beyond is undefined
    expected    mean of the counts if routing were even: what the host goes by to choose a kernel
    handle      as in ExpertInput
    """

    x_eMD: torch.Tensor
    scale_eMS: torch.Tensor | None
    counts_e: torch.Tensor
    expected: int
    handle: Any

    @property
    def offs_e(self) -> torch.Tensor:
        """As in ExpertInput: where each expert's rows would end if they lay one after the other."""
        return self.counts_e.cumsum(0, dtype=torch.int32)


class AllToAll(Backend):
    """Moves rows to the ranks of their experts, and the experts' outputs back to the rows' ranks.

    All ranks of the group call dispatch and combine in the same order.

    layout               the form of input that `dispatch` returns
    needs_equal_tokens   every rank must dispatch the same number of rows: padding rows, with `topk_idx == -1`, reach
                         no expert
    one_host             all ranks must share a host
    max_in_flight        dispatches that may wait for their combine at once; None for any number
    sm_choices           limits on its SMs worth trying beside compute; empty for a backend without a limit
    ubatch_shareable     one instance, built for whole steps, serves all ubatches of a step
    no_overlap_reason    why overlapping it with compute gains nothing; None where it may gain
    needs_process_group  dispatch or combine uses the process group, which must live as long as the instance
    runs_on_stream       dispatch and combine run on `stream` from end to end
    stream               CUDA stream of its dispatches and combines; None for the current one (see comm_stream.py)
    """

    layout: Layout = "contiguous"
    needs_equal_tokens: bool = False
    one_host: bool = False
    max_in_flight: int | None = None
    sm_choices: tuple[int, ...] = ()
    ubatch_shareable: bool = False
    no_overlap_reason: str | None = None
    needs_process_group: bool = True
    runs_on_stream: bool = False
    stream: CommStream | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """See Backend. Contiguous rows are grouped by expert with Triton on GPUs."""
        reason = triton_unavailable() if device.type == "cuda" else None
        if reason is None or cls.layout != "contiguous":
            return None
        return f"rows are sorted by expert in Triton: {reason}"

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if shape.num_ranks == 1:
            return "there is only one rank, so there is nothing to exchange"
        if cls.one_host and shape.num_nodes > 1:
            return f"its ranks must share a host, cluster.nodes is {shape.num_nodes}"
        return None

    @classmethod
    def auto_reason(cls, shape: BackendShape) -> str | None:
        return None if shape.num_ranks == 1 else super().auto_reason(shape)

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        """Return the bytes that one rank's instance holds from its start to its end."""
        return 0

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        """Return the bytes of rows and sums that one rank allocates for a dispatch and a combine of a full step."""
        return 0

    @classmethod
    def expert_rows(cls, shape: BackendShape) -> int:
        """Return the rows that the grouped GEMM's buffers have in a full step.

        On a CPU the rows of balanced routing. GPUs' shapes have the most rows there can be.
        """
        rows = shape.max_num_tokens * shape.top_k
        return rows * shape.num_ranks if shape.device == "cuda" else rows

    @classmethod
    def shared_memory_slots(cls, shape: BackendShape) -> tuple[int, ...]:
        """Return the `slot_bytes` of the channels it needs of the ranks' SharedMemoryGroup."""
        return ()

    @classmethod
    def build(cls, context: BackendContext) -> Self:
        """Return the instance of one rank. Collective."""
        raise NotImplementedError(f"{cls.__name__} is no backend of the registry")

    @abstractmethod
    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput] | Pending[MaskedInput]:
        """Send each row to the ranks of its experts; what comes back has the form that `layout` names.

        x_TD model dtype; topk_idx_TK int64 global expert ids, -1 = none; topk_weights_TK float32.
        T may be 0 (unless `needs_equal_tokens`) and may differ between ranks.
        """

    @abstractmethod
    def combine(self, y_RD: torch.Tensor, handle: Any) -> Pending[torch.Tensor]:
        """Weighted sum over each token's experts, back at its rank, in y's dtype.

        It is [T, D], or parts [P, T, D] that are still to be added (`sum_partials`), which may lie in the exchange's
        own memory: there until the next dispatch. y_RD are the experts' outputs in expert order; a token without
        experts gets zeros.
        """

    def dispatch_buffer(self, num_rows: int) -> torch.Tensor | None:
        """[T, D] in the model's dtype, rows maybe strided, where T rows spare `dispatch` to bring them; None: nowhere.

        It may be written once somebody has waited for the combine of the dispatch before.
        """
        return None

    def set_num_sms(self, num_sms: int | None) -> None:
        """Limit the SMs the exchange may use, where the backend can; None: as it likes."""

    def abort(self) -> None:
        """End all waits for peers on the device, now and later, from any thread; results are then undefined."""

    def close(self) -> None:
        """Release buffers shared with other ranks."""
