"""The experts' gated MLP over grouped rows. R routed rows, D hidden, I expert width, e local experts."""

from abc import abstractmethod
from typing import Any

import torch

from kernels.all2all.base import Layout
from kernels.backends.backend import Backend, BackendShape
from kernels.block_fp8 import BlockWeights

ROW_BYTES = 16  # TMA and torch's grouped_mm refuse other strides


class GroupedGemm(Backend):
    """y = (silu(x @ gate.T) * (x @ up.T)) @ down.T, each row with its own expert's weights.

    `layouts` are the forms of input it takes; with `masked_fp8`, masked rows must come in e4m3 with scales;
    `row_alignment` is what the first place of each expert must be a multiple of, on GPUs. Where `compiles_by_rows`, any
    new number of rows may compile another kernel; elsewhere the kernel changes at most once until the number doubles.
    `fp8_weights`: it computes with weights in FP8.
    """

    layouts: tuple[Layout, ...] = ("contiguous",)
    row_alignment: int = 1
    graph = True
    masked_fp8: bool = False
    compiles_by_rows: bool = False
    fp8_weights: bool = False

    @classmethod
    def step_bytes(cls, shape: BackendShape, num_rows: int) -> int:
        """Return the bytes of its inputs in expert order, activations and outputs for `num_rows` rows."""
        widths = 2 * shape.hidden_size + 3 * shape.expert_width
        return num_rows * widths * shape.dtype.itemsize

    @abstractmethod
    def __call__(self, expert_input: Any, w13_e2ID: Any, w2_eDI: Any) -> torch.Tensor:
        """y_RD of an ExpertInput in x's dtype and expert order. w13 and w2 have the form of `empty_weights`.

        R == 0 and e == 0 are allowed and give an empty result. Where the input has a `routing`, y has its
        places, and what lies at places without a row is undefined. Of a MaskedInput y_eMD.
        """

    def prepare(self, w13_e2ID: torch.Tensor, w2_eDI: torch.Tensor) -> tuple[Any, Any]:
        """Whole weights in the form that this product computes with, for those who have them so.

        w13 [e, 2I, D] holds gate rows first, then up rows; w2 [e, D, I].
        """
        return w13_e2ID, w2_eDI

    def empty_weights(
        self,
        num_experts: int,
        rows: int,
        columns: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> torch.Tensor | BlockWeights:
        """Uninitialised [num_experts, rows, columns], in the form and memory order that this product computes with."""
        return torch.empty(num_experts, rows, columns, device=device, dtype=dtype)

    def set_num_sms(self, num_sms: int | None) -> None:
        """Limit the SMs the product may use, where the backend can; None: all of them."""


def unaligned_reason(shape: BackendShape, function: str) -> str | None:
    """Return why `function`, which reads rows in units of ROW_BYTES, cannot take the experts of `shape`, or None."""
    for what, width in (("hidden size", shape.hidden_size), ("expert width", shape.expert_width)):
        num_bytes = width * shape.dtype.itemsize
        if num_bytes % ROW_BYTES:
            return (
                f"{function} needs rows of a multiple of {ROW_BYTES} bytes, "
                f"{what} {width} in {shape.dtype_name} has {num_bytes}"
            )
    return None
