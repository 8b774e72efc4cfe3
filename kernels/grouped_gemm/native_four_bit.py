"""The experts' MLP with weights in four bits on a CPU: compiled C expands four rows of a matrix at a time.

R routed rows, D hidden, I expert width, e local experts.
"""

import ctypes

import torch

from kernels.activation import ACTIVATIONS, Activation
from kernels.all2all.base import ExpertInput
from kernels.four_bit import FourBitWeights
from kernels.four_bit_format import FourBitFormat
from kernels.grouped_gemm.base import Biases
from kernels.grouped_gemm.four_bit import FourBitGemm
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
        self._mlp = load().grouped_gated_mlp_four_bit
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
        assert adapters is None, "unsupported_reason refuses adapters"
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
