"""The seam between the router and the experts: dispatch rows to experts, combine their answers.

T tokens of this rank, D hidden, K experts per token, R routed rows on this rank, e local experts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kernels.pending import Pending

Layout = Literal["contiguous", "masked"]


@dataclass(frozen=True)
class ExpertInput:
    """Rows for this rank's experts, grouped by local expert in ascending order.

    x_RD      rows in the model's dtype; one per (token, local expert) pair
    offs_e    int32 on x_RD's device: end of each local expert's rows (exclusive prefix ends);
              offs_e[-1] == R, and equal neighbours mean an expert without rows
    handle    what `combine` of the same backend needs; opaque to everybody else
    """

    x_RD: torch.Tensor
    offs_e: torch.Tensor
    handle: Any


class AllToAll(ABC):
    """Moves tokens to the ranks that hold their experts, and the experts' answers back.

    `layout` is the form of `ExpertInput` it produces; `needs_equal_tokens` says that every rank must
    call with the same number of rows (padding rows carry `topk_idx == -1` and reach no expert).
    All ranks of the group call dispatch and combine in the same order; several may be under way.
    """

    name: str
    layout: Layout = "contiguous"
    needs_equal_tokens: bool = False

    @abstractmethod
    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        """Send each row to the ranks of its experts.

        x_TD model dtype; topk_idx_TK int64 global expert ids, -1 = none; topk_weights_TK float32.
        T may be 0 (unless `needs_equal_tokens`) and may differ between ranks.
        """

    @abstractmethod
    def combine(self, y_RD: torch.Tensor, handle: Any) -> Pending[torch.Tensor]:
        """Weighted sum over each token's experts, back at its rank: [T, D] in y's dtype.

        y_RD are the experts' outputs in the row order of `ExpertInput.x_RD`; a token without experts gets zeros.
        """

    def set_num_sms(self, num_sms: int) -> None:  # noqa: B027 - most backends have no SMs to limit
        """Limit the SMs the exchange may use, where the backend can."""

    def close(self) -> None:  # noqa: B027
        """Release buffers shared with other ranks."""
