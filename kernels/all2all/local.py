"""The all-to-all of one rank: only the permutation into expert order. Knows nothing of other ranks.

T tokens, D hidden, K experts per token, R routed rows.
"""

from typing import Self

import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.payload import Gathered, permute_local
from kernels.backends.backend import BackendShape
from kernels.backends.context import BackendContext
from kernels.pending import Pending
from kernels.routing.permute import Permutation


class LocalAllToAll(AllToAll):
    """Returns permuted rows at once."""

    name = "local"
    graph = True
    needs_process_group = False
    no_overlap_reason = "one rank has nothing to exchange"

    def __init__(self, permutation: Permutation):
        self._permutation = permutation

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if shape.num_ranks > 1:
            return f"it serves one rank, cluster.ranks is {shape.num_ranks}"
        return None

    @classmethod
    def auto_reason(cls, shape: BackendShape) -> str | None:
        return "one rank holds all experts" if shape.num_ranks == 1 else None

    @classmethod
    def build(cls, context: BackendContext) -> Self:
        """Not collective: there is one rank."""
        return cls(context.permutation(torch.int64))

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        return Pending.ready(
            permute_local(x_TD, topk_idx_TK, topk_weights_TK, self._permutation, None)
        )

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        return Pending.ready(handle.partial_sums(y_RD))
