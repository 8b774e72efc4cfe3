"""The experts' gated MLP over grouped rows. R routed rows, D hidden, I expert width, e local experts."""

from abc import ABC, abstractmethod

import torch

from kernels.all2all.base import ExpertInput, Layout


class GroupedGemm(ABC):
    """y = (silu(x @ gate.T) * (x @ up.T)) @ down.T, each row with its own expert's weights."""

    name: str
    layout: Layout = "contiguous"

    @abstractmethod
    def __call__(
        self, expert_input: ExpertInput, w13_e2ID: torch.Tensor, w2_eDI: torch.Tensor
    ) -> torch.Tensor:
        """y_RD in x's dtype. w13 [e, 2I, D] holds gate rows first, then up rows; w2 [e, D, I].

        R == 0 and e == 0 are allowed and give an empty result.
        """

    def empty_weights(
        self,
        num_experts: int,
        rows: int,
        columns: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Uninitialised [num_experts, rows, columns], in the memory order that this product likes."""
        return torch.empty(num_experts, rows, columns, device=device, dtype=dtype)

    def set_num_sms(self, num_sms: int) -> None:  # noqa: B027
        """Limit the SMs the product may use, where the backend can."""
