"""The experts' MLP with weights in four bits on a CPU: compiled C expands four rows of a matrix at a time.

R routed rows, D hidden, I expert width, e local experts.
"""

import ctypes

import torch

from kernels.activation import ACTIVATIONS, Activation
from kernels.all2all.base import ExpertInput
from kernels.four_bit import FourBitWeights
from kernels.four_bit_format import FourBitFormat
from kernels.gated_activation import gated_activation
from kernels.grouped_gemm.base import Biases
from kernels.grouped_gemm.four_bit import FourBitGemm
from kernels.grouped_gemm.unfused import unfused_mlp
from kernels.lora.experts import ExpertAdapters
from kernels.native.library import load, native_unavailable

EXPANDED = 4  # rows of a matrix that are expanded at once, OUTPUTS of cpu.c


class FourBitPointers(ctypes.Structure):
    """four_bit of cpu.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "scales", "zeros", "order")]

    @classmethod
    def of(cls, weights: FourBitWeights) -> "FourBitPointers":
        assert all(tensor.is_contiguous() for tensor in weights.tensors) and not weights.tiled
        parts = (weights.values, weights.scales, weights.zeros, weights.order)
        return cls(*(None if part is None else part.data_ptr() for part in parts))


class NativeFourBit(FourBitGemm):
    """Products in float32, of rows of any float dtype."""

    name = "native_four_bit"
    devices = ("cpu",)
    auto = "the checkpoint's experts are in four bits, and stay so in memory"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return native_unavailable()

    def __init__(self, form: FourBitFormat):
        super().__init__(form)
        self._mlp, self._product = (
            load().grouped_gated_mlp_four_bit,
            load().grouped_product_four_bit,
        )
        self._scratch = torch.empty(0)

    def __call__(
        self,
        expert_input: ExpertInput,
        w13_e2ID: FourBitWeights,
        w2_eDI: FourBitWeights,
        activation: Activation = "silu",
        biases: Biases | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        dtype, x_RD = expert_input.x_RD.dtype, expert_input.x_RD.float().contiguous()
        num_rows, hidden_size = x_RD.shape
        num_experts, _, width = w2_eDI.shape
        y_RD = torch.empty_like(x_RD)
        if not num_rows:
            return y_RD.to(dtype)
        needed = 3 * num_rows * width + (EXPANDED + num_rows) * max(hidden_size, width)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        added = [bias.float().contiguous() for bias in biases or ()]
        if adapters is not None:
            b13_e2I, b2_eD = added or (None, None)
            return unfused_mlp(
                expert_input,
                adapters,
                up=lambda: self._multiply(
                    expert_input.permuted_rows(), w13_e2ID, expert_input.offs_e, b13_e2I
                ),
                activate=lambda h_R2I: gated_activation(h_R2I, activation),
                down=lambda h_RI: self._multiply(h_RI, w2_eDI, expert_input.offs_e, b2_eD),
            )
        b13, b2 = (bias.data_ptr() for bias in added) if added else (None, None)
        up, down = FourBitPointers.of(w13_e2ID), FourBitPointers.of(w2_eDI)
        self._mlp(
            x_RD.data_ptr(),
            expert_input.offs_e.data_ptr(),
            num_experts,
            hidden_size,
            width,
            ACTIVATIONS.index(activation),
            int(self.format.kind == "int4"),
            self.format.group,
            *(ctypes.addressof(up), ctypes.addressof(down), b13, b2),
            y_RD.data_ptr(),
            self._scratch.data_ptr(),
        )
        return y_RD.to(dtype)

    def _multiply(
        self,
        x_RK: torch.Tensor,
        weights: FourBitWeights,
        offs_e: torch.Tensor,
        bias_eN: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the product of each expert's rows, in their dtype; the scratch memory has the size for it."""
        num_experts, rows, columns = weights.shape
        wide_RK, out_RN = x_RK.float().contiguous(), torch.empty(len(x_RK), rows)
        pointers = FourBitPointers.of(weights)
        self._product(
            wide_RK.data_ptr(),
            offs_e.data_ptr(),
            *(num_experts, rows, columns),
            int(self.format.kind == "int4"),
            self.format.group,
            ctypes.addressof(pointers),
            None if bias_eN is None else bias_eN.data_ptr(),
            out_RN.data_ptr(),
            self._scratch.data_ptr(),
        )
        return out_RN.to(x_RK.dtype)
