"""Linear layers: a weight in the model's dtype, in FP8 or in four bits, and the kernels that multiply by it.

Know no block.

T tokens, K input width, N output width, I width of gate and of up.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch.nn import functional as F

from kernels import dense_four_bit, dense_fp8
from kernels.activation import Activation
from kernels.block_fp8 import BlockWeights, Fp8Rows
from kernels.four_bit import FourBitWeights
from kernels.fused import fused_kernels
from kernels.gated_activation import gated_activation
from kernels.lora.product import LoraWeights
from kernels.lora.rows import AdapterRows
from kernels.native.dense import dense_kernels

Rows = torch.Tensor | Fp8Rows


class Linear(ABC):
    """x @ weight.T + bias, the products of LoRA adapters beside it, and the forms of x that the product takes.

    weight   [N, K], contiguous
    bias     [N] in the model's dtype; None: zeros
    lora     the slots of adapters; None: the layer takes none
    """

    weight: torch.Tensor | BlockWeights | FourBitWeights
    bias: torch.Tensor | None
    lora: LoraWeights | None = None

    def __call__(
        self,
        x_TK: Rows,
        start: torch.Tensor | None = None,
        *,
        partial: bool = False,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """Return start + x @ weight.T + bias, a new tensor [T, N], with the adapters of the rows.

        x         [T, K] in the model's dtype, or the rows that `activate` and norms make for this layer
        start     a residual [T, N]; None: zeros
        partial   without start and bias, allow partial sums [P, T, N] for `sum_partials`
        adapters  of the rows of this forward; None: no row has one, which costs nothing
        """
        if adapters is not None and self.lora is not None:
            assert isinstance(x_TK, torch.Tensor), "adapters multiply rows in the model's dtype"
            return self.lora.add_to(self(x_TK, start), x_TK, adapters)
        if start is None:
            return self._multiply(x_TK, self.bias, partial)
        out_TN = self._multiply(x_TK, start, False)
        return out_TN if self.bias is None else out_TN.add_(self.bias)

    @abstractmethod
    def _multiply(self, x_TK: Rows, start: torch.Tensor | None, partial: bool) -> torch.Tensor:
        """Return start + x @ weight.T; start is [T, N], or [N] for all rows, or None for zeros."""

    def takes_fp8(self, x_TK: torch.Tensor, adapters: AdapterRows | None = None) -> bool:
        """Return whether the kernel before may write these rows in FP8: the product quantises them, and no adapter
        reads them.
        """
        return self._quantises(x_TK) and (adapters is None or self.lora is None)

    def activate(
        self,
        gate_up_T2I: torch.Tensor,
        activation: Activation,
        adapters: AdapterRows | None = None,
    ) -> Rows:
        """Return activation(gate) * up in the form that this layer takes."""
        if adapters is not None and self.lora is not None:
            return gated_activation(gate_up_T2I, activation)
        return self._activate(gate_up_T2I, activation)

    def _quantises(self, x_TK: torch.Tensor) -> bool:
        """Return whether the product quantises these rows."""
        return False

    def _activate(self, gate_up_T2I: torch.Tensor, activation: Activation) -> Rows:
        """Return activation(gate) * up in the form that the product takes."""
        return gated_activation(gate_up_T2I, activation)


class DenseLinear(Linear):
    """A weight in the model's dtype. Few rows go to a kernel of ours, where one can run, other rows to a library."""

    weight: torch.Tensor

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None):
        self.weight, self.bias = weight_NK, bias_N
        self._weight_KN = weight_NK.t()
        self._takes: Callable[[torch.Tensor, torch.Tensor], bool] | None = None
        self._skinny: Callable[..., torch.Tensor]
        fused = fused_kernels(weight_NK.device.type)
        native = dense_kernels(weight_NK.device.type, weight_NK.dtype)
        if fused is not None:
            self._takes, self._skinny = fused.takes_skinny, fused.skinny_linear
        elif native is not None:
            self._takes, self._skinny = native.takes, native.linear

    def _multiply(self, x_TK: Rows, start: torch.Tensor | None, partial: bool) -> torch.Tensor:
        assert isinstance(x_TK, torch.Tensor), "the weight is not in FP8"
        if self._takes is not None and self._takes(x_TK, self.weight):
            return self._skinny(x_TK, self.weight, start)
        if start is None or start.dim() == 1:
            return F.linear(x_TK, self.weight, start)
        return torch.addmm(start, x_TK, self._weight_KN)

    def in_float32(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T in float32 [T, N], whatever the dtype of both. For layers without a bias.

        A GPU multiplies tensors of 16 bits as they are, because their products are exact in float32.
        """
        assert self.bias is None, "the products alone are summed in float32"
        if x_TK.dtype == torch.float32:
            return self(x_TK)
        if x_TK.is_cuda:
            return torch.mm(x_TK, self._weight_KN, out_dtype=torch.float32)
        return DenseLinear(self.weight.float())(x_TK.float())


class Fp8Linear(Linear):
    """A weight in FP8 with a scale for each block. Rows that are not in FP8 are quantised, but for few rows."""

    weight: BlockWeights

    def __init__(self, weight_NK: BlockWeights, bias_N: torch.Tensor | None = None):
        self.weight, self.bias = weight_NK, bias_N
        self._fused = fused_kernels(weight_NK.values.device.type)

    def _multiply(self, x_TK: Rows, start: torch.Tensor | None, partial: bool) -> torch.Tensor:
        if isinstance(x_TK, torch.Tensor):
            if self._fused is not None and self._fused.takes_skinny(x_TK, self.weight):
                return self._fused.skinny_linear(x_TK, self.weight, start)
            x_TK = dense_fp8.quantise(x_TK)
        out_TN = dense_fp8.multiply(x_TK, self.weight, partial=partial and start is None)
        return out_TN if start is None else out_TN.add_(start)

    def _quantises(self, x_TK: torch.Tensor) -> bool:
        return self._fused is not None and not self._fused.takes_skinny(x_TK, self.weight)

    def _activate(self, gate_up_T2I: torch.Tensor, activation: Activation) -> Rows:
        return dense_fp8.activate(gate_up_T2I, activation)


class FourBitLinear(Linear):
    """A weight in four bits; rows stay in the model's dtype."""

    weight: FourBitWeights

    def __init__(self, weight_NK: FourBitWeights, bias_N: torch.Tensor | None = None):
        self.weight, self.bias = weight_NK, bias_N
        dense_four_bit.prepare(weight_NK)

    def _multiply(self, x_TK: Rows, start: torch.Tensor | None, partial: bool) -> torch.Tensor:
        assert isinstance(x_TK, torch.Tensor), "the weight is not in FP8"
        if start is None or start.dim() == 1:
            return dense_four_bit.multiply(x_TK, self.weight, start)
        return dense_four_bit.multiply(x_TK, self.weight).add_(start)
