"""One row of bytes per token with all that its experts need: one transfer instead of three.

A row is x, then K int32 expert ids, then K float32 weights. x is in the model's dtype, or in FP8 for experts that
compute with FP8: half the bytes, and the values that they would be rounded to on arrival. Knows nothing of the
transport of rows.

N rows, D hidden, K experts per row, W bytes of a row, S = D / 128 scales of a row in FP8.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll, ExpertInput, SlotColumn
from kernels.block_fp8 import BLOCK, Fp8Rows, quantise_groups
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.routing.device_routing import DeviceRouting
from kernels.routing.expert_map import ExpertMap
from kernels.routing.permute import Permutation, Routing, weighted_sum

ALIGNMENT = 16  # bytes; each field of each row can be viewed in its own type


@dataclass(frozen=True)
class RowFormat:
    """The layout of one token's bytes.

    top_k      ids of a row, with that of its adapter's slot
    dtype      of the hidden states and of sums
    adapters   the last id names the slot of an adapter, see `AllToAll.dispatch`
    fp8        x is D e4m3 values, then S float32 scales
    """

    hidden_size: int
    top_k: int
    dtype: torch.dtype
    fp8: bool = False
    adapters: bool = False

    @classmethod
    def of(cls, shape: BackendShape) -> "RowFormat":
        """Return the format of the rows of `shape`."""
        sizes = shape.hidden_size, shape.row_ids
        return cls(*sizes, shape.dtype, shape.fp8_rows, shape.expert_adapters)

    @property
    def row_and_sum_bytes(self) -> int:
        """Bytes of one row on its way to the experts and of its sum on the way back."""
        return self.row_bytes + self.hidden_size * self.dtype.itemsize

    @property
    def x_bytes(self) -> int:
        """Bytes of x, and where the ids begin."""
        if self.fp8:
            return self.hidden_size + 4 * self.hidden_size // BLOCK
        return -(-self.hidden_size * self.dtype.itemsize // 4) * 4

    @property
    def row_bytes(self) -> int:
        """W."""
        return -(-(self.x_bytes + 8 * self.top_k) // ALIGNMENT) * ALIGNMENT

    def x(self, rows_NW: torch.Tensor) -> torch.Tensor | Fp8Rows:
        """Return a view of x_ND of uint8 [N, W]."""
        if not self.fp8:
            return rows_NW[:, : self.hidden_size * self.dtype.itemsize].view(self.dtype)
        values = rows_NW[:, : self.hidden_size].view(torch.float8_e4m3fn)
        return Fp8Rows(values, rows_NW[:, self.hidden_size : self.x_bytes].view(torch.float32))

    def fields(
        self, rows_NW: torch.Tensor
    ) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor, torch.Tensor]:
        """Return views of uint8 [N, W]: x_ND, topk_idx_NK int32, topk_weights_NK float32."""
        ids, weights = self.x_bytes, self.x_bytes + 4 * self.top_k
        return (
            self.x(rows_NW),
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
        _fill(fields[0], x_ND)
        fields[1].copy_(topk_idx_NK)
        fields[2].copy_(topk_weights_NK)


def quantise(x_ND: torch.Tensor) -> Fp8Rows:
    """Return rows in FP8. D is a multiple of 128."""
    if not x_ND.is_cuda:
        return quantise_groups(x_ND)
    from kernels.triton.quantise_rows import quantise_rows

    return quantise_rows(x_ND)


def _fill(field: torch.Tensor | Fp8Rows, x_ND: torch.Tensor) -> None:
    """Copy x, quantised where the field is in FP8."""
    if isinstance(field, Fp8Rows):
        rounded = quantise(x_ND)
        field.values.copy_(rounded.values)
        field.scales.copy_(rounded.scales)
    else:
        field.copy_(x_ND)


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

    fp8_rows = True

    @abstractmethod
    def __init__(
        self,
        group: dist.ProcessGroup,
        expert_map: ExpertMap,
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
            context.expert_map,
            context.permutation(torch.int32),
            RowFormat.of(context.shape),
            context.device,
            context.shape.max_num_tokens,
        )


def permute_local(
    x_ND: torch.Tensor | Fp8Rows,
    topk_idx_NK: torch.Tensor,
    topk_weights_NK: torch.Tensor,
    permutation: Permutation,
    origin: Any,
    *,
    fp8: bool = False,
) -> ExpertInput:
    """Return the input of this rank's experts from gathered rows.

    topk_idx_NK   ids of the permutation's dtype among the experts of all ranks
    fp8           the experts take FP8: a GPU's few rows are quantised in the launch that permutes them
    """
    rows = wide_ND = None
    if fp8 and isinstance(x_ND, torch.Tensor) and x_ND.is_cuda:
        from kernels.triton import permute_pairs, quantise_rows

        if permute_pairs.quantises(topk_idx_NK.numel()):
            wide_ND, x_ND = x_ND, quantise_rows.empty_rows(x_ND)
            rows = wide_ND, x_ND
    routing = permutation.route(topk_idx_NK, rows)
    handle = Gathered(routing, topk_weights_NK, origin)
    values_ND, scale_NS = x_ND if isinstance(x_ND, Fp8Rows) else (x_ND, None)
    slots_N = SlotColumn.slots_of(topk_idx_NK) if permutation.adapters else None
    if isinstance(routing, DeviceRouting):
        return ExpertInput(values_ND, routing.offs_e, handle, routing, scale_NS, slots_N, wide_ND)
    if slots_N is not None:
        slots_N = slots_N.index_select(0, routing.row_R)
    scale_RS = None
    if scale_NS is None:
        values_RD = values_ND.index_select(0, routing.row_R)
    else:
        bytes_RD = values_ND.view(torch.uint8).index_select(0, routing.row_R)
        values_RD = bytes_RD.view(values_ND.dtype)
        scale_RS = scale_NS.index_select(0, routing.row_R)
    in_order = values_RD, routing.offs_e, handle, None, scale_RS, slots_N
    return ExpertInput(*in_order, source_R=routing.row_R)
