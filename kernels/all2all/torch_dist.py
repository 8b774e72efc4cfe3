"""An all-to-all by uneven `all_to_all_single` over gloo or NCCL: rows go only to the ranks of their experts.

A row is sent once to each rank that holds any of its experts, and returns weighted and summed. Mismatched splits would
hang, so the ranks exchange counts first, through the host.

T tokens of this rank, S rows sent, N rows received, D hidden, K experts per token, W bytes of a row,
R routed rows.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from kernels.all2all.base import ExpertInput
from kernels.all2all.payload import Gathered, PayloadAllToAll, RowFormat, permute_local
from kernels.host.waits import waiting
from kernels.interface.backend import BackendShape
from kernels.pending import Pending
from kernels.routing.expert_map import ExpertMap
from kernels.routing.permute import Permutation, sum_rows


@dataclass(frozen=True)
class _Route:
    """The sent rows: the token of each, and the rows by rank, for their way back."""

    token_S: torch.Tensor
    num_tokens: int
    send_splits: list[int]
    recv_splits: list[int]


def distributed_unavailable(device: torch.device) -> str | None:
    """Return why this torch has no collectives for tensors on `device`, or None."""
    if not dist.is_available():
        return "torch was built without distributed"
    if device.type == "cuda" and not dist.is_nccl_available():
        return "torch was built without NCCL"
    return None


class TorchDistAllToAll(PayloadAllToAll):
    """Two collectives before the experts, one after."""

    name = "torch_dist"
    auto = "moves each row only to the ranks of its experts"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return distributed_unavailable(device) or super().unavailable(device)

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        rows = min(shape.num_ranks, shape.top_k) * shape.max_num_tokens
        return 2 * rows * RowFormat.of(shape).row_and_sum_bytes

    def __init__(
        self,
        group: dist.ProcessGroup,
        expert_map: ExpertMap,
        permutation: Permutation,
        row_format: RowFormat,
        device: torch.device,
        max_num_tokens: int,
    ):
        self._group = group
        self._max_num_tokens = max_num_tokens
        self._format = row_format
        self._permutation = permutation
        starts = torch.tensor(expert_map.starts, device=device)
        self._first_r11, self._end_r11 = starts[:-1, None, None], starts[1:, None, None]

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        wanted_rT = ((topk_idx_TK >= self._first_r11) & (topk_idx_TK < self._end_r11)).any(-1)
        route = self._exchange_counts(wanted_rT)
        sent_SW = self._format.pack(
            x_TD.index_select(0, route.token_S),
            topk_idx_TK.index_select(0, route.token_S),
            topk_weights_TK.index_select(0, route.token_S),
        )
        rows_NW = sent_SW.new_empty(sum(route.recv_splits), sent_SW.shape[1])
        work = dist.all_to_all_single(
            rows_NW, sent_SW, route.recv_splits, route.send_splits, self._group, async_op=True
        )

        def finish() -> ExpertInput:
            with waiting():
                work.wait()
            return permute_local(*self._format.fields(rows_NW), self._permutation, route)

        return Pending(finish)

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        route: _Route = handle.origin
        sums_ND = handle.partial_sums(y_RD)
        back_SD = sums_ND.new_empty(len(route.token_S), sums_ND.shape[1])
        work = dist.all_to_all_single(
            back_SD, sums_ND, route.send_splits, route.recv_splits, self._group, async_op=True
        )

        def finish() -> torch.Tensor:
            with waiting():
                work.wait()
            return sum_rows(back_SD, route.token_S, route.num_tokens)

        return Pending(finish)

    def close(self) -> None:
        del self._group  # gloo's sockets stay open while anything refers to their group

    def _exchange_counts(self, wanted_rT: torch.Tensor) -> _Route:
        """Exchange the numbers of rows. wanted_rT: whether token t has experts on rank r."""
        send_r = wanted_rT.sum(1)
        recv_r = torch.empty_like(send_r)
        with waiting():
            dist.all_to_all_single(recv_r, send_r, group=self._group)
            send_splits, recv_splits = torch.stack((send_r, recv_r)).tolist()
        token_S = wanted_rT.nonzero()[:, 1]
        for splits, verb in ((send_splits, "sends"), (recv_splits, "receives")):
            assert all(0 <= rows <= self._max_num_tokens for rows in splits), (
                f"rank {self._group.rank()} {verb} {splits} rows, at most {self._max_num_tokens} each"
            )
        assert sum(send_splits) == len(token_S), (send_splits, len(token_S))
        return _Route(token_S, wanted_rT.shape[1], send_splits, recv_splits)
