"""Group rows by expert and sum the experts' answers back: shared by every all-to-all.

As few operators as possible, on CPU numpy's where they are cheaper: each costs 1 to 10 us there, and
a decode step has a handful of rows. Knows nothing of ranks or of how rows came here.

N rows that are here, K experts per row, R routed rows (one per row and local expert), e local experts,
D hidden.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Routing:
    """Which (row, expert) pairs are local, grouped by expert; rows of one expert keep their order.

    pair_R  int64 index into the flattened [N * K] pairs
    row_R   int64 row of each pair
    offs_e  int32 end of each local expert's pairs, offs_e[-1] == R
    """

    pair_R: torch.Tensor
    row_R: torch.Tensor
    offs_e: torch.Tensor


def expert_bounds(
    experts: range, device: torch.device | str, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """The ids `start .. stop` (both included) of a contiguous range of experts, for `route`."""
    return torch.arange(experts.start, experts.stop + 1, device=device, dtype=dtype)


def route(topk_idx_NK: torch.Tensor, bounds: torch.Tensor) -> Routing:
    """Pick the pairs whose expert lies in the range of `bounds` (see `expert_bounds`).

    topk_idx_NK int64 or int32 expert ids; -1 and ids outside the range reach nobody here. `bounds` has
    the same dtype. On CUDA this waits for the device once, to learn R.
    """
    if not topk_idx_NK.is_cuda:
        pair_R, row_R, offs_e = route_numpy(topk_idx_NK.numpy(), bounds.numpy())
        return Routing(*map(torch.from_numpy, (pair_R, row_R, offs_e)))
    ids_P, pair_P = topk_idx_NK.reshape(-1).sort(stable=True)
    edges = torch.searchsorted(ids_P, bounds, out_int32=True)
    ends = edges.tolist()
    first, last = ends[0], ends[-1]
    pair_R = pair_P[first:last]
    return Routing(pair_R, pair_R // topk_idx_NK.shape[1], edges[1:] - first)


def route_numpy(
    topk_idx_NK: np.ndarray, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of `route` for arrays: an operator of numpy costs a third of one of torch."""
    ids_P = topk_idx_NK.reshape(-1)
    pair_P = ids_P.argsort(kind="stable")
    edges = ids_P[pair_P].searchsorted(bounds)
    pair_R = pair_P[edges[0] : edges[-1]]
    offs_e = (edges[1:] - edges[0]).astype(np.int32)
    return pair_R, pair_R // topk_idx_NK.shape[1], offs_e


def weighted_sum(
    y_RD: torch.Tensor, routing: Routing, topk_weights_NK: torch.Tensor
) -> torch.Tensor:
    """Sum of each row's expert outputs times their weights: [N, D] in y's dtype.

    y_RD in the order of `routing`; topk_weights_NK float32. A row without local experts gets zeros.
    Accumulates in float32, in an order that depends on the routing alone.
    """
    weights_R = topk_weights_NK.reshape(-1).index_select(0, routing.pair_R)
    return _sum(y_RD, routing.row_R, topk_weights_NK.shape[0], weights_R)


def sum_rows(y_ND: torch.Tensor, row_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sum of the y of each row: [num_rows, D] in y's dtype; zeros where there is none.

    row_N int64 in 0 .. num_rows - 1. Accumulates in float32, in an order that depends on row_N alone.
    """
    return _sum(y_ND, row_N, num_rows, None)


def _sum(
    y_ND: torch.Tensor, row_N: torch.Tensor, num_rows: int, weights_N: torch.Tensor | None
) -> torch.Tensor:
    if y_ND.is_cuda and y_ND.shape[0]:
        # index_add_ uses atomics there, and so no fixed order.
        sorted_row_N, position_N = row_N.sort(stable=True)
        starts = torch.searchsorted(sorted_row_N, torch.arange(num_rows, device=y_ND.device))
        if weights_N is not None:
            weights_N = weights_N.index_select(0, position_N)
        out_ND = F.embedding_bag(
            position_N, y_ND.float(), starts, mode="sum", per_sample_weights=weights_N
        )
    else:
        # Half the time of embedding_bag for 8 rows on a CPU, the same for 64.
        scaled_ND = y_ND.float() if weights_N is None else y_ND * weights_N.unsqueeze(1)
        out_ND = scaled_ND.new_zeros(num_rows, y_ND.shape[1]).index_add_(0, row_N, scaled_ND)
    return out_ND.to(y_ND.dtype)
