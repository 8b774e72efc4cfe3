"""One row of bytes per token with all that its experts need: one transfer instead of three.

A row is x, then K int32 expert ids, then K float32 weights. Knows nothing of the transport of rows.

N rows, D hidden, K experts per row, W bytes of a row.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.backends.backend import BackendShape
from kernels.backends.context import BackendContext
from kernels.routing.device_routing import DeviceRouting
from kernels.routing.permute import Permutation, Routing, weighted_sum
from kernels.routing.placement import ExpertPlacement

ALIGNMENT = 16  # bytes; each field of each row can be viewed in its own type


@dataclass(frozen=True)
class RowFormat:
    """The layout of one token's bytes."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: BackendShape) -> "RowFormat":
        """Return the format of the rows of `shape`."""
        return cls(shape.hidden_size, shape.top_k, shape.dtype)

    @property
    def row_and_sum_bytes(self) -> int:
        """Bytes of one row on its way to the experts and of its sum on the way back."""
        return self.row_bytes + self.hidden_size * self.dtype.itemsize

    @property
    def x_bytes(self) -> int:
        return -(-self.hidden_size * self.dtype.itemsize // 4) * 4

    @property
    def row_bytes(self) -> int:
        """W."""
        return -(-(self.x_bytes + 8 * self.top_k) // ALIGNMENT) * ALIGNMENT

    def fields(self, rows_NW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of uint8 [N, W]: x_ND, topk_idx_NK int32, topk_weights_NK float32."""
        ids, weights = self.x_bytes, self.x_bytes + 4 * self.top_k
        return (
            rows_NW[:, : self.hidden_size * self.dtype.itemsize].view(self.dtype),
            rows_NW[:, ids:weights].view(torch.int32),
            rows_NW[:, weights : weights + 4 * self.top_k].view(torch.float32),
        )

    def pack(
        self, x_ND: torch.Tensor, topk_idx_NK: torch.Tensor, topk_weights_NK: torch.Tensor
    ) -> torch.Tensor:
        """Return new rows, uint8 [N, W] on x's device."""
        rows_NW = torch.empty(x_ND.shape[0], self.row_bytes, dtype=torch.uint8, device=x_ND.device)
        self.pack_into(rows_NW, x_ND, topk_idx_NK, topk_weights_NK)
        return rows_NW

    def pack_into(
        self,
        rows_NW: torch.Tensor,
        x_ND: torch.Tensor,
        topk_idx_NK: torch.Tensor,
        topk_weights_NK: torch.Tensor,
    ) -> None:
        """Fill uint8 [N, W], contiguous, on x's device."""
        fields = self.fields(rows_NW)
        if x_ND.is_cuda:
            from kernels.triton.pack_rows import pack_rows

            pack_rows(x_ND, topk_idx_NK.contiguous(), topk_weights_NK.contiguous(), fields)
            return
        for field, value in zip(fields, (x_ND, topk_idx_NK, topk_weights_NK), strict=True):
            field.copy_(value)


@dataclass(frozen=True)
class Gathered:
    """The handle of an all-to-all that gathers rows: their local experts and weights.

    origin   input of the all-to-all for sending the rows' sums back to their ranks
    """

    routing: Routing | DeviceRouting
    topk_weights_NK: torch.Tensor
    origin: Any

    def partial_sums(self, y_RD: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each gathered row over this rank's experts: [N, D] in y's dtype."""
        return weighted_sum(y_RD, self.routing, self.topk_weights_NK)


class PayloadAllToAll(AllToAll):
    """An all-to-all that sends each row to the ranks of its experts alone."""

    @abstractmethod
    def __init__(
        self,
        group: dist.ProcessGroup,
        placement: ExpertPlacement,
        permutation: Permutation,
        row_format: RowFormat,
        device: torch.device,
        max_num_tokens: int,
    ):
        """Take the group and the experts of its ranks."""

    @classmethod
    def build(cls, context: BackendContext) -> Self:
        return cls(
            context.process_group(cls.name),
            context.placement,
            context.permutation(torch.int32),
            RowFormat.of(context.shape),
            context.device,
            context.shape.max_num_tokens,
        )


def permute_local(
    x_ND: torch.Tensor,
    topk_idx_NK: torch.Tensor,
    topk_weights_NK: torch.Tensor,
    permutation: Permutation,
    origin: Any,
) -> ExpertInput:
    """Return the input of this rank's experts from gathered rows.

    topk_idx_NK   ids of the permutation's dtype among the experts of all ranks
    """
    routing = permutation.route(topk_idx_NK)
    handle = Gathered(routing, topk_weights_NK, origin)
    if isinstance(routing, DeviceRouting):
        return ExpertInput(x_ND, routing.offs_e, handle, routing)
    return ExpertInput(x_ND.index_select(0, routing.row_R), routing.offs_e, handle)
