"""The all-to-all of one rank: only the permutation into expert order. Knows nothing of other ranks.

T tokens, D hidden, K experts per token, R routed rows.
"""

from dataclasses import replace
from typing import Self

import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.payload import Gathered, permute_local
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.pending import Pending
from kernels.routing.permute import Permutation


class LocalAllToAll(AllToAll):
    """Returns permuted rows at once."""

    name = "local"
    graph = True
    moves_rows = False
    needs_process_group = False
    fp8_rows = True
    no_overlap_reason = "one rank has nothing to exchange"

    def __init__(self, permutation: Permutation, *, fp8: bool = False):
        self._permutation, self._fp8 = permutation, fp8

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
        """Not collective: there is one rank. Ids of experts have no column of adapters, because no row travels."""
        context = replace(context, shape=replace(context.shape, expert_adapters=False))
        return cls(context.permutation(torch.int64), fp8=context.shape.fp8_rows)

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        rows = x_TD, topk_idx_TK, topk_weights_TK
        return Pending.ready(permute_local(*rows, self._permutation, None, fp8=self._fp8))

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        return Pending.ready(handle.partial_sums(y_RD))
