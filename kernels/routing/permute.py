"""The permutation of gathered rows into expert order on a CPU, and the weighted sums back.

Ids of experts are slots (`ExpertMap`), of which a rank has a contiguous range.
It uses few operators, numpy's where they are cheaper, because each costs 1 to 10 us and a decode step has a handful of
rows. `kernels.routing.device_routing` is the counterpart on GPUs. Knows nothing of ranks or of the transport of rows.

N gathered rows, K experts per row, R routed rows (one per row and local expert), e local experts, D hidden.
"""

from ctypes import CDLL
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from kernels.block_fp8 import Fp8Rows
from kernels.native.library import load_or_none
from kernels.routing.device_routing import DeviceRouting, route_on_device


@dataclass(frozen=True)
class Routing:
    """The local (row, expert) pairs, grouped by expert; rows of one expert keep their order.

    pair_R  int64 index into the flattened [N * K] pairs
    row_R   int64 gathered row of each pair
    offs_e  int32 end of each local expert's pairs; offs_e[-1] == R
    """

    pair_R: torch.Tensor
    row_R: torch.Tensor
    offs_e: torch.Tensor


class Permutation:
    """Permutes gathered rows into the order of a range of local experts, on the CPU or on a GPU.

    dtype            of the expert ids
    alignment        on GPUs: the first permuted row of each expert is a multiple of it
    unaligned_rows   up to so many rows of an expert on average are not aligned: no rows lie between experts
    adapters         the last id of a row is negative and names the slot of its adapter
    """

    def __init__(
        self,
        experts: range,
        *,
        num_experts: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.int32,
        alignment: int = 1,
        unaligned_rows: float = 0.0,
        adapters: bool = False,
    ):
        self.experts, self.adapters = experts, adapters
        self._num_experts = num_experts
        self._alignment, self._unaligned_rows = alignment, unaligned_rows
        self._bounds = expert_bounds(experts, "cpu", dtype)
        assert alignment == 1 or torch.device(device).type == "cuda", (alignment, device)

    def route(
        self, topk_idx_NK: torch.Tensor, rows: tuple[torch.Tensor, Fp8Rows] | None = None
    ) -> Routing | DeviceRouting:
        """Return the routing of rows with these experts: ids of `dtype` among all experts, -1 for none.

        rows   on GPUs: see `permute_pairs`
        """
        if not topk_idx_NK.is_cuda:
            return route(topk_idx_NK, self._bounds)
        return route_on_device(
            topk_idx_NK,
            self.experts,
            num_experts=self._num_experts,
            alignment=self._alignment,
            unaligned_rows=self._unaligned_rows,
            rows=rows,
        )


def expert_bounds(
    experts: range, device: torch.device | str, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return the ids `start .. stop` (both included) of a contiguous range of experts, for `route`."""
    return torch.arange(experts.start, experts.stop + 1, device=device, dtype=dtype)


def route(topk_idx_NK: torch.Tensor, bounds: torch.Tensor) -> Routing:
    """Return the pairs of the experts in the range of `bounds` (see `expert_bounds`). CPU only.

    topk_idx_NK   int64 or int32 expert ids, of the dtype of `bounds`; -1 and ids outside the range are not local
    """
    pair_R, row_R, offs_e = route_numpy(topk_idx_NK.numpy(), bounds.numpy())
    return Routing(*map(torch.from_numpy, (pair_R, row_R, offs_e)))


def route_numpy(
    topk_idx_NK: np.ndarray, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the fields of `route` as arrays: an operator of numpy costs a third of torch's."""
    ids_P = topk_idx_NK.reshape(-1)
    native = load_or_none()
    if native is not None:
        return _route_native(native, ids_P, bounds, topk_idx_NK.shape[1])
    pair_P = ids_P.argsort(kind="stable")
    edges = ids_P[pair_P].searchsorted(bounds)
    pair_R = pair_P[edges[0] : edges[-1]]
    offs_e = (edges[1:] - edges[0]).astype(np.int32)
    return pair_R, pair_R // topk_idx_NK.shape[1], offs_e


def _route_native(
    native: CDLL, ids_P: np.ndarray, bounds: np.ndarray, top_k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids_P = np.ascontiguousarray(ids_P, dtype=np.int64)
    pair_P, row_P = np.empty_like(ids_P), np.empty_like(ids_P)
    offs_e = np.empty(len(bounds) - 1, dtype=np.int32)
    count = native.route_pairs(
        ids_P.ctypes.data,
        len(ids_P),
        int(bounds[0]),
        len(offs_e),
        top_k,
        pair_P.ctypes.data,
        row_P.ctypes.data,
        offs_e.ctypes.data,
    )
    return pair_P[:count], row_P[:count], offs_e


def weighted_sum(
    y_RD: torch.Tensor, routing: Routing | DeviceRouting, topk_weights_NK: torch.Tensor
) -> torch.Tensor:
    """Return the sum of each gathered row's expert outputs times their weights: [N, D] in y's dtype.

    y_RD              outputs in expert order, as `routing` has it
    topk_weights_NK   float32
    A row without local experts gets zeros.
    """
    if isinstance(routing, DeviceRouting):
        from kernels.triton import weighted_sum as kernel

        return kernel.weighted_sum(y_RD, routing.permuted_idx_NK, topk_weights_NK)
    weight_R = topk_weights_NK.reshape(-1).index_select(0, routing.pair_R)
    return sum_rows(y_RD, routing.row_R, topk_weights_NK.shape[0], weight_R)


def sum_rows(
    y_RD: torch.Tensor,
    row_R: torch.Tensor,
    num_rows: int,
    weight_R: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the y of each row: [num_rows, D] in y's dtype, zeros for a row without y.

    row_R     int64 in 0 .. num_rows - 1
    weight_R  float32; None for ones
    out       receives the result; None for a new tensor
    Sums accumulate in float32, in an order that depends on row_R alone.
    """
    native = load_or_none() if y_RD.dtype == torch.float32 and not y_RD.is_cuda else None
    if native is not None and (out is None or out.dtype == torch.float32):
        return _sum_native(native, y_RD, row_R, num_rows, weight_R, out)
    if y_RD.is_cuda and y_RD.shape[0]:
        # index_add_ uses atomics there, and so no fixed order.
        sorted_row_R, position_R = row_R.sort(stable=True)
        starts = torch.searchsorted(sorted_row_R, torch.arange(num_rows, device=y_RD.device))
        if weight_R is not None:
            weight_R = weight_R.index_select(0, position_R)
        sums_ND = F.embedding_bag(
            position_R, y_RD.float(), starts, mode="sum", per_sample_weights=weight_R
        )
    else:
        # Half the time of embedding_bag for 8 rows on a CPU, the same for 64.
        scaled_RD = y_RD.float() if weight_R is None else y_RD * weight_R.unsqueeze(1)
        if out is not None and out.dtype == torch.float32:
            return out.zero_().index_add_(0, row_R, scaled_RD)
        sums_ND = scaled_RD.new_zeros(num_rows, y_RD.shape[1]).index_add_(0, row_R, scaled_RD)
    return sums_ND.to(y_RD.dtype) if out is None else out.copy_(sums_ND)


def _sum_native(
    native: CDLL,
    y_RD: torch.Tensor,
    row_R: torch.Tensor,
    num_rows: int,
    weight_R: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty(num_rows, y_RD.shape[1])
    y_RD, row_R = y_RD.contiguous(), row_R.contiguous()
    assert out.is_contiguous() and (weight_R is None or weight_R.is_contiguous())
    native.sum_rows(
        y_RD.data_ptr(),
        row_R.data_ptr(),
        None if weight_R is None else weight_R.data_ptr(),
        y_RD.shape[0],
        y_RD.shape[1],
        num_rows,
        out.data_ptr(),
    )
    return out
