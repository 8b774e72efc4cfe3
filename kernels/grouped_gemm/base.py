"""The experts' gated MLP over rows in expert order. R rows, D hidden, I expert width, e local experts."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch

from kernels.activation import Activation
from kernels.all2all.base import Layout
from kernels.block_fp8 import BlockWeights
from kernels.four_bit import FourBitWeights
from kernels.interface.backend import Backend, BackendShape
from kernels.lora.experts import ExpertAdapters

Biases = tuple[torch.Tensor, torch.Tensor]  # b13_e2I, b2_eD
ROW_BYTES = 16  # TMA and torch's grouped_mm refuse other strides


class GroupedGemm(Backend):
    """y = (activation(x @ gate.T) * (x @ up.T)) @ down.T, each row with the weights of its expert.

    layouts            the forms of input it takes
    row_alignment      on GPUs: the first permuted row of each expert must be a multiple of it
    unaligned_rows     up to so many rows of an expert on average need no alignment
    masked_fp8         masked rows must come in e4m3 with scales
    fp8_rows           contiguous rows may come in e4m3 with scales
    compiles_by_rows   any new number of rows may compile another kernel; otherwise the kernel changes at most once
                       before the number doubles
    fp8_weights        it computes with weights in FP8
    fp8_dense          beside it, dense products with weights that the checkpoint stores in FP8 run in FP8 too, by
                       `kernels.dense_fp8`
    adds_biases        it adds the biases of experts
    four_bit           it computes with weights in four bits, of checkpoints that store the experts so
    """

    layouts: tuple[Layout, ...] = ("contiguous",)
    row_alignment: int = 1
    unaligned_rows: float = 0.0
    graph = True
    masked_fp8: bool = False
    fp8_rows: bool = False
    compiles_by_rows: bool = False
    fp8_weights: bool = False
    fp8_dense: bool = False
    adds_biases: bool = False
    four_bit: bool = False

    @classmethod
    def build(cls, shape: BackendShape) -> Self:
        """Return the instance of one rank."""
        return cls()

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if shape.expert_bias and not cls.adds_biases:
            return "it adds no biases, the model's experts have them"
        return None

    @classmethod
    def compile_kernels(
        cls, shape: BackendShape, dense: Sequence[tuple[int, int]], sizes: Sequence[int]
    ) -> None:
        """Compile what would compile at first use, into the folder of compiled kernels; from a process without ranks.

        dense   [N, K] of the dense products with weights in FP8
        sizes   tokens of a rank's steps
        """

    @classmethod
    def step_bytes(cls, shape: BackendShape, num_rows: int) -> int:
        """Return the bytes of its inputs in expert order, activations and outputs for `num_rows` rows."""
        widths = 2 * shape.hidden_size + 3 * shape.moe_intermediate_size
        return num_rows * widths * shape.dtype.itemsize

    @abstractmethod
    def __call__(
        self,
        expert_input: Any,
        w13_e2ID: Any,
        w2_eDI: Any,
        activation: Activation = "silu",
        biases: Biases | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        """Return the outputs in x's dtype: y_RD in expert order of an ExpertInput, y_eMD of a MaskedInput.

        w13       in the form of `empty_weights`, for each expert first the rows of gate, then the rows of up
        w2        in the form of `empty_weights`
        activation   of gate; every backend computes every activation
        biases    added to the products where the backend `adds_biases`; None: zeros
        adapters  added to the products for rows with `slots_N`; None: no row has one. Masked input has none
        R == 0 and e == 0 are allowed. With a `routing`, y has its permuted rows, and the unused rows are undefined.
        """

    def empty_weights(
        self,
        num_experts: int,
        rows: int,
        columns: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> torch.Tensor | BlockWeights | FourBitWeights:
        """Return uninitialised [num_experts, rows, columns], in the form and memory order that this product needs."""
        return torch.empty(num_experts, rows, columns, device=device, dtype=dtype)

    def set_num_sms(self, num_sms: int | None) -> None:
        """Limit the SMs of the product, where the backend has a limit; None: all SMs."""


def unaligned_reason(shape: BackendShape, function: str) -> str | None:
    """Return why `function`, which reads rows in units of ROW_BYTES, cannot take the experts of `shape`, or None."""
    for what, width in (
        ("hidden size", shape.hidden_size),
        ("expert width", shape.moe_intermediate_size),
    ):
        num_bytes = width * shape.dtype.itemsize
        if num_bytes % ROW_BYTES:
            return (
                f"{function} needs rows of a multiple of {ROW_BYTES} bytes, "
                f"{what} {width} in {shape.dtype_name} has {num_bytes}"
            )
    return None
