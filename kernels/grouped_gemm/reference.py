"""The experts' MLP as a loop over experts: runs everywhere, and is the reference in the contract tests.

R routed rows, D hidden, I expert width, e local experts.
"""

import torch
from torch.nn import functional as F

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput
from kernels.gated_activation import gated_activation
from kernels.grouped_gemm.base import Biases, GroupedGemm


class ReferenceGroupedGemm(GroupedGemm):
    """One pair of products for each expert with rows."""

    name = "reference"
    auto = "a loop over experts runs everywhere"
    graph = False
    adds_biases = True

    def __call__(
        self,
        expert_input: ExpertInput,
        w13_e2ID: torch.Tensor,
        w2_eDI: torch.Tensor,
        activation: Activation = "silu",
        biases: Biases | None = None,
    ) -> torch.Tensor:
        x_RD = expert_input.permuted_rows()
        y_RD = torch.empty_like(x_RD)
        start = 0
        for expert, end in enumerate(expert_input.offs_e.tolist()):
            if end > start:
                b13_2I, b2_D = (None, None) if biases is None else (b[expert] for b in biases)
                h_R2I = F.linear(x_RD[start:end], w13_e2ID[expert], b13_2I)
                h_RI = gated_activation(h_R2I, activation)
                y_RD[start:end] = F.linear(h_RI, w2_eDI[expert], b2_D)
            start = end
        return y_RD
