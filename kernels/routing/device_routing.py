"""The permutation of rows into expert order on a GPU. All shapes are set on the host, which never waits for the device.

The number of local rows exists only on the device. So there are permuted rows for any routing; a permuted row behind
the last row of its expert, or behind all experts, is unused and its content undefined.

N gathered rows, K experts per row, e local experts, R permuted rows, D hidden.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from kernels.block_fp8 import Fp8Rows


@dataclass(frozen=True)
class DeviceRouting:
    """Indices between gathered rows and permuted rows. All tensors int32, on the device of the rows.

    permuted_idx_NK   permuted row of each (row, expert) pair, -1 if the expert is not local
    row_R             gathered row of each permuted row; undefined for an unused one
    starts_e          first permuted row of each expert, a multiple of `alignment`
    ends_e            end of each expert's permuted rows
    offs_e            number of rows of this expert and all experts before it
    expected          number of used permuted rows if routing were even; the host chooses kernels by it
    """

    permuted_idx_NK: torch.Tensor
    row_R: torch.Tensor
    starts_e: torch.Tensor
    ends_e: torch.Tensor
    offs_e: torch.Tensor
    alignment: int
    expected: int

    @property
    def num_permuted(self) -> int:
        """Number of permuted rows, R."""
        return self.row_R.shape[0]

    @property
    def mean_rows(self) -> float:
        """Rows of an expert if routing were even."""
        return self.expected / max(1, len(self.ends_e))


def max_permuted(num_rows: int, top_k: int, num_local: int, alignment: int = 1) -> int:
    """Return the permuted rows that suffice for any routing of `num_rows` rows to `top_k` different experts each."""
    spread = num_rows * min(top_k, num_local) + num_local * (alignment - 1)
    crowded = num_local * (-(-num_rows // alignment) * alignment)
    return min(spread, crowded) // alignment * alignment


def route_on_device(
    topk_idx_NK: torch.Tensor,
    experts: range,
    *,
    num_experts: int,
    alignment: int = 1,
    unaligned_rows: float = 0.0,
    rows: tuple[torch.Tensor, Fp8Rows] | None = None,
) -> DeviceRouting:
    """Permute the pairs of `experts`; rows of one expert keep their order.

    topk_idx_NK   int64 or int32 ids among all `num_experts`, different within a row; -1 and ids outside `experts` are
                  not local
    unaligned_rows   see `Permutation`; the choice depends on shapes alone, as a captured graph needs
    rows          see `permute_pairs`
    """
    (num_rows, top_k), num_local = topk_idx_NK.shape, len(experts)
    expected = max(1, num_rows * top_k * num_local // max(1, num_experts))
    if expected <= unaligned_rows * num_local:
        alignment = 1
    num_permuted = max_permuted(num_rows, top_k, num_local, alignment)
    if num_permuted:
        from kernels.triton.permute_pairs import permute_pairs

        permuted_idx_NK, row_R, bounds_3e = permute_pairs(
            topk_idx_NK, experts, num_permuted, alignment, rows
        )
    else:
        permuted_idx_NK = torch.full_like(topk_idx_NK, -1, dtype=torch.int32).contiguous()
        row_R, bounds_3e = permuted_idx_NK.new_empty(0), permuted_idx_NK.new_zeros(3, num_local)
    starts_e, ends_e, offs_e = bounds_3e.unbind(0)
    return DeviceRouting(permuted_idx_NK, row_R, starts_e, ends_e, offs_e, alignment, expected)


def identity_routing(offs_e: torch.Tensor, num_rows: int) -> DeviceRouting:
    """Return the routing of rows that are in expert order already; `offs_e` int32 ends of each expert's rows."""
    row_R = torch.arange(num_rows, dtype=torch.int32, device=offs_e.device)
    starts_e = F.pad(offs_e[:-1], (1, 0)) if len(offs_e) else offs_e
    return DeviceRouting(
        row_R.unsqueeze(1), row_R, starts_e, offs_e, offs_e, alignment=1, expected=num_rows
    )
