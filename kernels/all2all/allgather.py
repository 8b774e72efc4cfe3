"""An all-to-all by all-gather of all rows, then reduce-scatter of the ranks' partial sums.

The host reads no counts before it starts. All ranks must dispatch the same number of rows.

T tokens of a rank, N = ranks * T, D hidden, K experts per token, W bytes of a row, R routed rows.
"""

from typing import Self

import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.payload import Gathered, RowFormat, permute_local
from kernels.all2all.torch_dist import distributed_unavailable
from kernels.host.waits import waiting
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.pending import Pending
from kernels.routing.permute import Permutation

# torch 2.13 renamed both and warns at the old names, which 2.11 has alone.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGatherAllToAll(AllToAll):
    """all_gather_into_tensor of one packed payload; reduce_scatter_tensor of [N, D]."""

    name = "allgather"
    auto = "no counts to read on the host before the experts"
    needs_equal_tokens = True
    fp8_rows = True
    graph = True  # over NCCL, which has a stream of its own beside `stream`

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return distributed_unavailable(device) or super().unavailable(device)

    @classmethod
    def auto_reason(cls, shape: BackendShape) -> str | None:
        """See Backend. On a CPU torch_dist runs wherever this does, and sends less."""
        return super().auto_reason(shape) if shape.device == "cuda" else None

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        rows = (shape.num_ranks + 1) * shape.max_num_tokens
        return rows * RowFormat.of(shape).row_and_sum_bytes

    @classmethod
    def build(cls, context: BackendContext) -> Self:
        return cls(
            context.process_group(cls.name),
            context.permutation(torch.int32),
            RowFormat.of(context.shape),
        )

    def __init__(
        self,
        group: dist.ProcessGroup,
        permutation: Permutation,
        row_format: RowFormat,
    ):
        self._group = group
        self._num_ranks = group.size()
        self._format = row_format
        self._permutation = permutation

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        sent_TW = self._format.pack(x_TD, topk_idx_TK, topk_weights_TK)
        rows_NW = sent_TW.new_empty(self._num_ranks * sent_TW.shape[0], sent_TW.shape[1])
        work = all_gather(rows_NW, sent_TW, group=self._group, async_op=True)

        def finish() -> ExpertInput:
            with waiting():
                work.wait()
            return permute_local(*self._format.fields(rows_NW), self._permutation, None)

        return Pending(finish)

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        sums_ND = handle.partial_sums(y_RD)
        out_TD = sums_ND.new_empty(sums_ND.shape[0] // self._num_ranks, sums_ND.shape[1])
        work = reduce_scatter(out_TD, sums_ND, group=self._group, async_op=True)

        def finish() -> torch.Tensor:
            with waiting():
                work.wait()
            return out_TD

        return Pending(finish)

    def close(self) -> None:
        del self._group  # gloo's sockets stay open while anything refers to their group
