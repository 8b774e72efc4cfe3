"""The seam between the router and the experts: dispatch rows to experts, combine their answers.

T tokens of this rank, D hidden, K experts per token, R routed rows on this rank, e local experts, N rows
that came here, M rows an expert has room for, S scales of a row.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kernels.all2all.comm_stream import CommStream
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


class AllToAll(ABC):
    """Moves tokens to the ranks that hold their experts, and the experts' answers back.

    `layout` is the form of `ExpertInput` it produces; `needs_equal_tokens` says that every rank must
    call with the same number of rows (padding rows carry `topk_idx == -1` and reach no expert); `graph`
    that dispatch and combine never wait on the host, so that CUDA graphs can hold them.
    `sm_choices` are the limits on its SMs worth trying beside compute, none where it takes no limit.
    `stream`, where set, is what an exchange runs on (comm_stream.py says behind what).
    All ranks of the group call dispatch and combine in the same order; `max_in_flight` dispatches may wait for
    their combine at once, None for any number.
    """

    name: str
    layout: Layout = "contiguous"
    needs_equal_tokens: bool = False
    graph: bool = False
    max_in_flight: int | None = None
    sm_choices: tuple[int, ...] = ()
    stream: CommStream | None = None

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

    def set_num_sms(self, num_sms: int | None) -> None:  # noqa: B027 - most have no SMs to limit
        """Limit the SMs the exchange may use, where the backend can; None: as it likes."""

    def close(self) -> None:  # noqa: B027
        """Release buffers shared with other ranks."""
