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
from kernels.grouped_gemm.unfused import unfused_mlp
from kernels.lora.experts import ExpertAdapters


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
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        b13_e2I, b2_eD = biases or (None, None)
        ends = expert_input.offs_e.tolist()
        return unfused_mlp(
            expert_input,
            adapters,
            up=lambda: _multiply(expert_input.permuted_rows(), w13_e2ID, b13_e2I, ends),
            activate=lambda h_R2I: gated_activation(h_R2I, activation),
            down=lambda h_RI: _multiply(h_RI, w2_eDI, b2_eD, ends),
        )


def _multiply(
    x_RK: torch.Tensor,
    w_eNK: torch.Tensor,
    b_eN: torch.Tensor | None,
    ends: list[int],
) -> torch.Tensor:
    """Return the product of each expert's rows, which end at `ends`."""
    out_RN = x_RK.new_empty(len(x_RK), w_eNK.shape[1])
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        if end > start:
            bias_N = None if b_eN is None else b_eN[expert]
            out_RN[start:end] = F.linear(x_RK[start:end], w_eNK[expert], bias_N)
    return out_RN
