"""The experts' MLP in one call of compiled C, for the few rows of a decode step on a CPU.

R routed rows, D hidden, I expert width, e local experts.
"""

import torch

from kernels.activation import ACTIVATIONS, Activation
from kernels.all2all.base import ExpertInput
from kernels.grouped_gemm.base import Biases, GroupedGemm
from kernels.grouped_gemm.torch_grouped import TorchGroupedGemm
from kernels.interface.backend import BackendShape
from kernels.lora.experts import ExpertAdapters
from kernels.native.library import load, native_unavailable, native_unsupported_reason

# With more rows, a library's matrix products are faster. At 2 rows of each of 16 experts of 128 x 64 this takes 57 us,
# torch 180.
MAX_ROWS_PER_EXPERT = 8


class NativeGroupedGemm(GroupedGemm):
    """float32 on CPU only. Large steps, and steps with adapters, go to torch's grouped product."""

    name = "native"
    devices = ("cpu",)
    auto = "one call of compiled C for the few rows of a decode"
    adds_biases = True

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return native_unavailable() or TorchGroupedGemm.unavailable(device)

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        reason = native_unsupported_reason(shape.dtype_name)
        return reason or TorchGroupedGemm.unsupported_reason(shape)

    def __init__(self) -> None:
        self._mlp = load().grouped_gated_mlp
        self._large = TorchGroupedGemm()
        self._scratch = torch.empty(0)

    def __call__(
        self,
        expert_input: ExpertInput,
        w13_e2ID: torch.Tensor,
        w2_eDI: torch.Tensor,
        activation: Activation = "silu",
        biases: Biases | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        x_RD = expert_input.x_RD
        num_rows, hidden_size = x_RD.shape
        num_experts, _, width = w2_eDI.shape
        if num_rows > MAX_ROWS_PER_EXPERT * num_experts or adapters is not None:
            return self._large(expert_input, w13_e2ID, w2_eDI, activation, biases, adapters)
        y_RD = torch.empty_like(x_RD)
        if not num_rows:
            return y_RD
        if self._scratch.numel() < 3 * num_rows * width:
            self._scratch = torch.empty(3 * num_rows * width)
        assert x_RD.is_contiguous() and x_RD.dtype == torch.float32, (x_RD.shape, x_RD.dtype)
        assert w13_e2ID.is_contiguous() and w2_eDI.is_contiguous()
        self._mlp(
            x_RD.data_ptr(),
            expert_input.offs_e.data_ptr(),
            num_experts,
            hidden_size,
            width,
            ACTIVATIONS.index(activation),
            w13_e2ID.data_ptr(),
            w2_eDI.data_ptr(),
            *(biases[0].data_ptr(), biases[1].data_ptr()) if biases else (None, None),
            y_RD.data_ptr(),
            self._scratch.data_ptr(),
        )
        return y_RD
