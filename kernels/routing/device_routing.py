"""Rows to expert order and back on a GPU, with shapes that the host knows: it never waits for the device.

How many rows are local is known on the device alone, so there are as many places as there could be
rows. Places past the last row of an expert, and past all experts, hold nothing anybody reads.

N rows that are here, K experts per row, e local experts, R places, D hidden.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class DeviceRouting:
    """Where the rows of local experts lie in expert order. All int32, on the rows' device.

    permuted_idx_NK   place of each (row, expert) pair, -1 if its expert is not local
    row_R      row at each place; undefined at places that hold none
    starts_e   first place of each expert, a multiple of `alignment`
    ends_e     end of each expert's rows
    offs_e     how many rows this expert and those before it have
    expected   rows, if routing were even: what the host goes by to choose a kernel
    """

    permuted_idx_NK: torch.Tensor
    row_R: torch.Tensor
    starts_e: torch.Tensor
    ends_e: torch.Tensor
    offs_e: torch.Tensor
    alignment: int
    expected: int

    @property
    def num_places(self) -> int:
        """R."""
        return self.row_R.shape[0]


def max_places(num_rows: int, top_k: int, num_local: int, alignment: int = 1) -> int:
    """Places that suffice for any routing of `num_rows` rows to `top_k` different experts each."""
    spread = num_rows * min(top_k, num_local) + num_local * (alignment - 1)
    crowded = num_local * (-(-num_rows // alignment) * alignment)
    return min(spread, crowded) // alignment * alignment


def route_on_device(
    topk_idx_NK: torch.Tensor, experts: range, *, num_experts: int, alignment: int = 1
) -> DeviceRouting:
    """Place the pairs whose expert is in `experts`, rows of one expert in their order.

    topk_idx_NK int64 or int32 ids of all `num_experts`; -1 and other ranks' ids reach nobody here. A
    row's ids differ from each other.
    """
    (num_rows, top_k), num_local = topk_idx_NK.shape, len(experts)
    num_places = max_places(num_rows, top_k, num_local, alignment)
    if num_places:
        from kernels.triton.place_pairs import place_pairs

        permuted_idx_NK, row_R, bounds_3e = place_pairs(topk_idx_NK, experts, num_places, alignment)
    else:
        permuted_idx_NK = torch.full_like(topk_idx_NK, -1, dtype=torch.int32).contiguous()
        row_R, bounds_3e = permuted_idx_NK.new_empty(0), permuted_idx_NK.new_zeros(3, num_local)
    expected = max(1, topk_idx_NK.numel() * num_local // max(1, num_experts))
    return DeviceRouting(permuted_idx_NK, row_R, *bounds_3e.unbind(0), alignment, expected)


def routing_in_order(offs_e: torch.Tensor, num_places: int) -> DeviceRouting:
    """The routing of rows that are in expert order already, `offs_e` int32 ends of each expert's rows."""
    row_R = torch.arange(num_places, dtype=torch.int32, device=offs_e.device)
    starts_e = F.pad(offs_e[:-1], (1, 0)) if len(offs_e) else offs_e
    return DeviceRouting(
        row_R.unsqueeze(1), row_R, starts_e, offs_e, offs_e, alignment=1, expected=num_places
    )
