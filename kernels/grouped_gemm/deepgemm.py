"""The experts' MLP on DeepGEMM, in bfloat16 or in FP8 with a scale per block of 128: Hopper and newer.

FP8 weights have a scale for each block of 128 x 128, from the checkpoint or rounded while they are loaded. Rows have
a scale for each 128 values, and are quantised here unless they arrive so. DeepGEMM compiles its kernels at first use,
into a folder that all ranks of a host share. In FP8 a Triton kernel multiplies an expert's few rows, which DeepGEMM
pads to 128.

R permuted rows, D hidden, I expert width, e local experts, M rows of an expert's array.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput, MaskedInput
from kernels.block_fp8 import BLOCK, BlockWeights
from kernels.grouped_gemm.base import Biases, GroupedGemm, unaligned_reason
from kernels.grouped_gemm.deepgemm_kernels import compile_products, products_of
from kernels.grouped_gemm.deepgemm_package import (
    DISTRIBUTIONS,
    load_deep_gemm,
    package_unavailable,
)
from kernels.grouped_gemm.skinny_fp8 import MOST_ROWS, SkinnyFp8
from kernels.grouped_gemm.unfused import activate_used, unfused_mlp
from kernels.host.capability import too_old_gpu
from kernels.interface.backend import BackendShape
from kernels.lora.experts import ExpertAdapters
from kernels.pending import wait_previous_ubatch


class DeepGemm(GroupedGemm):
    """bfloat16."""

    name = "deepgemm"
    devices = ("cuda",)
    auto = (
        "faster than torch_grouped on an H200: 127 us a layer for 998 rows against 137, "
        "377 us for 16,347 against 424"
    )
    distributions = DISTRIBUTIONS
    layouts = ("contiguous", "masked")
    compiles_by_rows = True
    width_multiple = BLOCK // 2

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return too_old_gpu(device, (9, 0)) or package_unavailable()

    @classmethod
    def compile_kernels(
        cls, shape: BackendShape, dense: Sequence[tuple[int, int]], sizes: Sequence[int]
    ) -> None:
        alignment = int(load_deep_gemm().get_mk_alignment_for_contiguous_layout())
        fewest, fp8 = cls.unaligned_rows, cls.fp8_weights
        compile_products(
            products_of(shape, dense, sizes, fp8=fp8, alignment=alignment, fewest=fewest)
        )

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if shape.dtype != torch.bfloat16:
            return f"{cls.name} takes bfloat16 only, model.dtype is {shape.dtype_name}"
        for what, width in (
            ("hidden size", shape.hidden_size),
            ("expert width", shape.moe_intermediate_size),
        ):
            if width % cls.width_multiple:
                return f"{cls.name} needs widths of a multiple of {cls.width_multiple}, {what} is {width}"
        return super().unsupported_reason(shape) or unaligned_reason(shape, cls.name)

    def __init__(self) -> None:
        from kernels.triton.gated_activation import gated_activation

        self._deep_gemm = load_deep_gemm()
        self._gated_activation: Callable[..., Any] = gated_activation
        self._all_sms = torch.cuda.get_device_properties().multi_processor_count
        self._num_sms = self._all_sms
        self.row_alignment = int(self._deep_gemm.get_mk_alignment_for_contiguous_layout())

    def set_num_sms(self, num_sms: int | None) -> None:
        """See GroupedGemm. The limit holds for the whole process; a new number may compile kernels."""
        self._num_sms = min(num_sms or self._all_sms, self._all_sms)
        self._deep_gemm.set_num_sms(self._num_sms)

    def __call__(
        self,
        expert_input: ExpertInput | MaskedInput,
        w13_e2ID: Any,
        w2_eDI: Any,
        activation: Activation = "silu",
        biases: Biases | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        assert biases is None, "unsupported_reason refuses biases"
        if isinstance(expert_input, MaskedInput):
            assert adapters is None, "all-to-alls with masked rows carry no adapters"
            return self.call_masked(expert_input, w13_e2ID, w2_eDI, activation)
        routing = expert_input.device_routing()
        x_ND, num_experts = expert_input.x_RD, len(routing.ends_e)
        if not routing.num_permuted:
            return x_ND.new_empty(0, x_ND.shape[1], dtype=torch.bfloat16)
        assert routing.alignment % self.row_alignment == 0, routing.alignment
        if adapters is not None:
            return unfused_mlp(
                expert_input,
                adapters,
                up=lambda: self._contiguous(self._fetch(expert_input), w13_e2ID, routing.ends_e),
                activate=lambda h_R2I: activate_used(h_R2I, routing.ends_e, activation),
                down=lambda h_RI: self._contiguous(self._quantise(h_RI), w2_eDI, routing.ends_e),
            )
        h_R2I = self._contiguous(self._fetch(expert_input), w13_e2ID, routing.ends_e)
        num_used = routing.ends_e[num_experts - 1 :]
        activated = self._gated_activation(h_R2I.unsqueeze(0), num_used, activation)
        wait_previous_ubatch()
        return self._contiguous(_first(activated), w2_eDI, routing.ends_e)

    def call_masked(
        self, masked: MaskedInput, w13_e2ID: Any, w2_eDI: Any, activation: Activation = "silu"
    ) -> torch.Tensor:
        """Return y_eMD in bfloat16; rows from counts_e on are undefined."""
        x = masked.x_eMD if masked.scale_eMS is None else (masked.x_eMD, masked.scale_eMS)
        h_eM2I = self._masked(x, w13_e2ID, masked)
        activated = self._gated_activation(h_eM2I, masked.counts_e, activation)
        wait_previous_ubatch()
        return self._masked(activated, w2_eDI, masked)

    def _fetch(self, expert_input: ExpertInput) -> Any:
        """Return the permuted rows as the product takes them."""
        return expert_input.permuted_rows()

    def _quantise(self, x_RK: torch.Tensor) -> Any:
        """Return rows in bfloat16 as the product takes them."""
        return x_RK

    def _contiguous(self, x_RD: Any, weights: Any, ends_e: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x_RD), weights.shape[1], dtype=x_RD.dtype, device=x_RD.device)
        self._deep_gemm.m_grouped_bf16_gemm_nt_contiguous(
            x_RD, weights, out, ends_e, use_psum_layout=True
        )
        return out

    def _masked(self, x_eMD: Any, weights: Any, masked: MaskedInput) -> torch.Tensor:
        shape = (*x_eMD.shape[:2], weights.shape[1])
        out = torch.empty(shape, dtype=x_eMD.dtype, device=x_eMD.device)
        self._deep_gemm.m_grouped_bf16_gemm_nt_masked(
            x_eMD, weights, out, masked.counts_e, masked.expected
        )
        return out


class DeepGemmFp8(DeepGemm):
    """FP8 products of bfloat16 rows; masked rows come quantised."""

    name = "deepgemm_fp8"
    auto = "the checkpoint's experts are in FP8, and are computed with as they are"
    width_multiple = BLOCK
    unaligned_rows = float(MOST_ROWS)
    fp8_weights = True
    fp8_dense = True
    masked_fp8 = True
    fp8_rows = True

    @classmethod
    def auto_reason(cls, shape: BackendShape) -> str | None:
        """See Backend. FP8 would change the answers of a checkpoint that is not stored in it."""
        return super().auto_reason(shape) if shape.fp8_checkpoint else None

    def __init__(self) -> None:
        super().__init__()
        from kernels.triton.gated_activation_fp8 import gated_activation_fp8
        from kernels.triton.quantise_rows import quantise_rows
        from kernels.triton.scatter_fp8 import scatter_fp8

        self._scatter, self._gated_activation = scatter_fp8, gated_activation_fp8
        self._quantise_rows = quantise_rows
        self._skinny = SkinnyFp8()

    def __call__(
        self,
        expert_input: ExpertInput | MaskedInput,
        w13_e2ID: Any,
        w2_eDI: Any,
        activation: Activation = "silu",
        biases: Biases | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        if isinstance(expert_input, ExpertInput) and self._skinny.takes(expert_input):
            assert biases is None, "unsupported_reason refuses biases"
            call = (expert_input, w13_e2ID, w2_eDI, activation)
            return self._skinny(*call, adapters=adapters, num_sms=self._num_sms)
        return super().__call__(expert_input, w13_e2ID, w2_eDI, activation, biases, adapters)

    def empty_weights(
        self,
        num_experts: int,
        rows: int,
        columns: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> BlockWeights:
        return BlockWeights.empty(num_experts, rows, columns, device=device)

    def _fetch(self, expert_input: ExpertInput) -> Any:
        routing = expert_input.device_routing()
        order = routing.permuted_idx_NK, routing.num_permuted
        return self._scatter(expert_input.x_RD, *order, expert_input.scale_RS)

    def _quantise(self, x_RK: torch.Tensor) -> Any:
        return self._quantise_rows(x_RK, early=False)

    def _contiguous(self, x_RD: Any, weights: BlockWeights, ends_e: torch.Tensor) -> torch.Tensor:
        rows = x_RD[0]
        shape = (len(rows), weights.values.shape[1])
        out = torch.empty(shape, dtype=torch.bfloat16, device=rows.device)
        self._deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            tuple(x_RD), (weights.values, weights.scales), out, ends_e, use_psum_layout=True
        )
        return out

    def _masked(self, x_eMD: Any, weights: BlockWeights, masked: MaskedInput) -> torch.Tensor:
        rows = x_eMD[0]
        shape = (*rows.shape[:2], weights.values.shape[1])
        out = torch.empty(shape, dtype=torch.bfloat16, device=rows.device)
        self._deep_gemm.fp8_m_grouped_gemm_nt_masked(
            tuple(x_eMD), (weights.values, weights.scales), out, masked.counts_e, masked.expected
        )
        return out


def _first(activated: Any) -> Any:
    """Return the only group of a tensor, or of a tensor and its scales."""
    if isinstance(activated, tuple):
        return tuple(part.squeeze(0) for part in activated)
    return activated.squeeze(0)
