"""Takes the place of an all-to-all while a rank belongs to no group. Knows nothing of groups."""

from typing import Any, NoReturn

import torch

from kernels.all2all.base import AllToAll


class UnboundAllToAll(AllToAll):
    """Refuses every call: a model that holds it needs `with_backends` before it runs."""

    name = "unbound"

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> NoReturn:
        raise AssertionError("the rank has joined no group, so it has no all-to-all")

    def combine(self, y_RD: torch.Tensor, handle: Any) -> NoReturn:
        raise AssertionError("the rank has joined no group, so it has no all-to-all")
