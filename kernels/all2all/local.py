"""All experts are here: no exchange, only the grouping by expert. Knows nothing of other ranks.

T tokens, D hidden, K experts per token, R routed rows.
"""

import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.payload import Gathered, permute_local
from kernels.pending import Pending
from kernels.routing.permute import Permutation


class LocalAllToAll(AllToAll):
    """The exchange of a group of one rank."""

    name = "local"
    graph = True

    def __init__(self, order: Permutation):
        self._order = order

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        return Pending.ready(permute_local(x_TD, topk_idx_TK, topk_weights_TK, self._order, None))

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        return Pending.ready(handle.partial_sums(y_RD))
