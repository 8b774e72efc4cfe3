"""The seam between the router and the experts: dispatch rows to their experts, combine the experts' outputs.

T tokens of this rank, D hidden, K experts per token, R rows in expert order on this rank, e local experts, N gathered
rows, M rows of an expert's array, S scales of a row.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from kernels.all2all.comm_stream import CommStream
from kernels.block_fp8 import Fp8Rows, widen_rows
from kernels.host.triton_version import triton_unavailable
from kernels.interface.backend import Backend, BackendShape
from kernels.interface.context import BackendContext
from kernels.lora.experts import ExpertRows
from kernels.pending import Pending
from kernels.routing.device_routing import DeviceRouting, identity_routing

Layout = Literal["contiguous", "masked"]


def sum_partials(sums: torch.Tensor) -> torch.Tensor:
    """Return [T, D] of a result of `combine`: partial sums [P, T, D] are added in float32."""
    return sums if sums.dim() == 2 else sums.sum(0, dtype=torch.float32).to(sums.dtype)


class SlotColumn:
    """A further id of each row: the slot of its adapter, as a negative id, of which no rank is owner."""

    def __init__(self, max_rows: int, device: torch.device | str):
        self._none_T1 = torch.full((max_rows, 1), -1, device=device)
        self._weight_T1 = torch.zeros(max_rows, 1, device=device)

    def beside(
        self, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor, slots_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both with the further column, of weight 0.

        slots_T   int64, 0 for none; None: no row has an adapter
        """
        num_rows = len(topk_idx_TK)
        code_T1 = self._none_T1[:num_rows]
        if slots_T is not None:
            code_T1 = code_T1 - slots_T.unsqueeze(1)
        weight_T1 = self._weight_T1[:num_rows]
        return torch.cat((topk_idx_TK, code_T1), 1), torch.cat((topk_weights_TK, weight_T1), 1)

    @staticmethod
    def slots_of(topk_idx_NK: torch.Tensor) -> torch.Tensor:
        """Return the slots [N] of rows with the column, in the dtype of the ids."""
        return -1 - topk_idx_NK[:, -1]


@dataclass(frozen=True)
class ExpertInput:
    """Rows for this rank's experts, grouped by local expert in ascending order: the `contiguous` layout.

    x_RD      rows in the model's dtype, or e4m3 with scales; one per (token, local expert) pair. With `routing` the
              gathered rows [N, D], each once: the grouped GEMM reads them through the routing, or takes
              `permuted_rows`
    offs_e    int32 on x_RD's device: end of each local expert's rows. Equal neighbours mean an expert without rows.
              offs_e[-1] is the number of rows: R, or with `routing` at most R
    handle    input of `combine` of the same backend; opaque to other code
    routing   on GPUs: the permutation into expert order, which the host cannot read without waiting
    scale_RS  float32 scale of each 128 values of e4m3 rows, of any strides; None for rows in the model's dtype
    slots_N   int64 or int32: slot of the adapter of each row of `x_RD`, 0 for none; None: adapters change no expert
    wide_RD   rows of `x_RD` in the model's dtype, where this rank has quantised them; None: they are not there
    source_R  int64: dispatched row of each row, where a CPU has permuted rows that were not moved; None: elsewhere
    """

    x_RD: torch.Tensor
    offs_e: torch.Tensor
    handle: Any
    routing: DeviceRouting | None = None
    scale_RS: torch.Tensor | None = None
    slots_N: torch.Tensor | None = None
    wide_RD: torch.Tensor | None = None
    source_R: torch.Tensor | None = None

    def with_slots(self, slots_T: torch.Tensor) -> Self:
        """Return the input with the slots of the dispatched rows, int64, of an all-to-all that moves no rows."""
        slots_N = slots_T if self.source_R is None else slots_T.index_select(0, self.source_R)
        return replace(self, slots_N=slots_N)

    def wide_rows(self) -> torch.Tensor:
        """Return the rows in their order, those of e4m3 in bfloat16."""
        if self.wide_RD is not None:
            return self.wide_RD
        if self.scale_RS is None:
            return self.x_RD
        return widen_rows(Fp8Rows(self.x_RD, self.scale_RS))

    def permuted_rows(self) -> torch.Tensor:
        """Return the rows in expert order, those of e4m3 in bfloat16; with `routing` unused rows are undefined."""
        x_ND = self.wide_rows()
        if self.routing is None:
            return x_ND
        from kernels.triton.scatter_rows import scatter_rows

        return scatter_rows(x_ND, self.routing.permuted_idx_NK, self.routing.num_permuted)

    def adapter_rows(self) -> ExpertRows:
        """Return the adapters of the rows, where rows carry them."""
        assert self.slots_N is not None, "the all-to-all carries no adapters"
        routing = self.routing
        if routing is None:
            return ExpertRows.in_order(self.slots_N, self.offs_e)
        return ExpertRows(self.slots_N, routing.row_R, routing.starts_e, routing.ends_e)

    def device_routing(self) -> DeviceRouting:
        """Return `routing`, or the identity for rows that are in expert order already."""
        return self.routing or identity_routing(self.offs_e, self.x_RD.shape[0])


@dataclass(frozen=True)
class MaskedInput:
    """Rows for this rank's experts, those of each expert in an array of its own: the `masked` layout.

    x_eMD       rows in the model's dtype, or e4m3 with scales
    scale_eMS   float32 scale of each 128 values of e4m3 rows, contiguous along M; None for rows in the model's dtype
    counts_e    int32: used rows of each expert; the content of the rows beyond is undefined
    expected    mean of the counts if routing were even; the host chooses kernels by it
    handle      as in ExpertInput
    """

    x_eMD: torch.Tensor
    scale_eMS: torch.Tensor | None
    counts_e: torch.Tensor
    expected: int
    handle: Any

    @property
    def offs_e(self) -> torch.Tensor:
        """Ends of the experts' rows if they lay one behind another, as in ExpertInput."""
        return self.counts_e.cumsum(0, dtype=torch.int32)


class AllToAll(Backend):
    """Moves rows to the ranks of their experts, and the experts' outputs back to the rows' ranks.

    All ranks of the group call dispatch and combine in the same order.

    layouts              the forms of input that `dispatch` returns
    needs_equal_tokens   every rank must dispatch the same number of rows: padding rows, with `topk_idx == -1`, reach
                         no expert
    one_host             all ranks must share a host
    max_in_flight        dispatches that may wait for their combine at once; None for any number
    sm_choices           limits on its SMs worth trying beside compute; empty for a backend without a limit
    ubatch_shareable     one instance, built for whole steps, serves all ubatches of a step
    no_overlap_reason    why overlapping it with compute gains nothing; None where it may gain
    needs_process_group  dispatch or combine uses the process group, which must live as long as the instance
    runs_on_stream       dispatch and combine run on `stream` from end to end
    carries_adapters     rows may carry the slot of their adapter, by a further id
    moves_rows           dispatch sends rows to other ranks; without, the slots are added by `ExpertInput.with_slots`
    slot_column          rows carry it by this column, in every dispatch; None: they do not
    fp8_rows             rows travel in e4m3 with scales where `BackendShape.fp8_rows`; sums never do
    stream               CUDA stream of its dispatches and combines; None for the current one (see comm_stream.py)
    """

    layouts: tuple[Layout, ...] = ("contiguous",)
    needs_equal_tokens: bool = False
    one_host: bool = False
    max_in_flight: int | None = None
    sm_choices: tuple[int, ...] = ()
    ubatch_shareable: bool = False
    no_overlap_reason: str | None = None
    needs_process_group: bool = True
    runs_on_stream: bool = False
    fp8_rows: bool = False
    carries_adapters: bool = True
    moves_rows: bool = True
    slot_column: SlotColumn | None = None
    stream: CommStream | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """See Backend. Contiguous rows are grouped by expert with Triton on GPUs."""
        reason = triton_unavailable() if device.type == "cuda" else None
        if reason is None or "contiguous" not in cls.layouts:
            return None
        return f"rows are sorted by expert in Triton: {reason}"

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if shape.num_ranks == 1:
            return "there is only one rank, so there is nothing to exchange"
        if cls.one_host and shape.num_nodes > 1:
            return f"its ranks must share a host, cluster.nodes is {shape.num_nodes}"
        if shape.expert_adapters and not cls.carries_adapters:
            return "its rows carry no adapter, and lora.targets has experts"
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
    def graph_rows(cls, shape: BackendShape) -> int:
        """Return the most rows of a rank in a step that CUDA graphs can hold, where `graph` is true."""
        return shape.max_num_tokens

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
        """Send each row to the ranks of its experts; return the rows of this rank's experts in one of `layouts`.

        x_TD              in the model's dtype
        topk_idx_TK       int64 ids of experts, as slots of all ranks (`ExpertMap`); -1 for none. With a
                          `slot_column` the last column is that of the adapters
        topk_weights_TK   float32
        T may be 0, and may differ between ranks unless `needs_equal_tokens`.
        """

    @abstractmethod
    def combine(self, y_RD: torch.Tensor, handle: Any) -> Pending[torch.Tensor]:
        """Return the weighted sum over the experts of each token of this rank, in y's dtype.

        y_RD   outputs of the experts in expert order
        The result is [T, D], or partial sums [P, T, D] for `sum_partials`. Partial sums may lie in memory of the
        all-to-all, valid until the next dispatch. A token without experts gets zeros.
        """

    def dispatch_buffer(self, num_rows: int) -> torch.Tensor | None:
        """Return a buffer that `dispatch` sends without a copy; None if the backend has no such buffer.

        [T, D] in the model's dtype, rows may be strided. It may be written after the combine of the previous dispatch
        was waited for.
        """
        return None

    @classmethod
    def granted_sms(cls, num_sms: int) -> int:
        """Return the SMs that a limit of `num_sms` leaves to dispatch and combine."""
        return num_sms

    def set_num_sms(self, num_sms: int | None) -> None:
        """Limit the SMs of dispatch and combine to `granted_sms`, where the backend has a limit; None: no limit."""

    def reset(self) -> None:
        """Forget dispatches without a combine, because an error ended their step on every rank.

        If the error was one rank's alone, peers wait for that rank: then the epoch ends, see `abort`.
        """

    def abort(self) -> None:
        """End all waits for peers on the device, now and later, from any thread; results are then undefined."""

    def close(self) -> None:
        """Release buffers that other ranks can access."""
