"""All experts are here: no exchange, only the grouping by expert. Knows nothing of other ranks.

T tokens, D hidden, K experts per token, R routed rows.
"""

import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.pending import Pending
from kernels.permute import Routing, expert_bounds, route, weighted_sum


class LocalAllToAll(AllToAll):
    """The exchange of a group of one rank."""

    name = "local"

    def __init__(self, num_experts: int, device: torch.device | str):
        self._bounds = expert_bounds(range(num_experts), device)

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        routing = route(topk_idx_TK, self._bounds)
        x_RD = x_TD.index_select(0, routing.row_R)
        return Pending.ready(ExpertInput(x_RD, routing.offs_e, (routing, topk_weights_TK)))

    def combine(
        self, y_RD: torch.Tensor, handle: tuple[Routing, torch.Tensor]
    ) -> Pending[torch.Tensor]:
        return Pending.ready(weighted_sum(y_RD, *handle))
