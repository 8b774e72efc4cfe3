"""The experts' MLP as a loop over experts: runs everywhere, and is the reference in the contract tests.

R routed rows, D hidden, I expert width, e local experts.
"""

from itertools import pairwise

import torch
from torch.nn import functional as F

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput
from kernels.gated_activation import gated_activation
from kernels.grouped_gemm.base import Biases, GroupedGemm
from kernels.lora.experts import ExpertAdapters


class ReferenceGroupedGemm(GroupedGemm):
    """One pair of products for each expert with rows."""

    name = "reference"
    auto = "a loop over experts runs everywhere"
    graph = False
    adds_biases = True
    adds_adapters = True

    def __call__(
        self,
        expert_input: ExpertInput,
        w13_e2ID: torch.Tensor,
        w2_eDI: torch.Tensor,
        activation: Activation = "silu",
        biases: Biases | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        x_RD, width = expert_input.permuted_rows(), w2_eDI.shape[2]
        y_RD, h_R2I = torch.empty_like(x_RD), x_RD.new_empty(len(x_RD), 2 * width)
        b13_e2I, b2_eD = biases or (None, None)
        ends = expert_input.offs_e.tolist()
        _multiply(x_RD, w13_e2ID, b13_e2I, ends, h_R2I)
        if adapters is not None:
            rows = expert_input.adapter_rows()
            adapters.up.add_to(h_R2I, x_RD, rows)
        h_RI = gated_activation(h_R2I, activation)
        _multiply(h_RI, w2_eDI, b2_eD, ends, y_RD)
        if adapters is not None:
            adapters.down.add_to(y_RD, h_RI, rows)
        return y_RD


def _multiply(
    x_RK: torch.Tensor,
    w_eNK: torch.Tensor,
    b_eN: torch.Tensor | None,
    ends: list[int],
    out_RN: torch.Tensor,
) -> None:
    """Write the product of each expert's rows, which end at `ends`."""
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        if end > start:
            bias_N = None if b_eN is None else b_eN[expert]
            out_RN[start:end] = F.linear(x_RK[start:end], w_eNK[expert], bias_N)
