"""The common part of grouped GEMMs with weights in four bits."""

import torch

from kernels.four_bit import BLOCK, FourBitWeights
from kernels.four_bit_format import FourBitFormat
from kernels.grouped_gemm.base import GroupedGemm
from kernels.interface.backend import BackendShape


class FourBitGemm(GroupedGemm):
    """Holds weights as FourBitWeights. `tiled`: in the order of tensor cores."""

    four_bit = True
    adds_biases = True
    tiled: bool = False

    @classmethod
    def build(cls, shape: BackendShape) -> "FourBitGemm":
        """See GroupedGemm."""
        assert shape.four_bit is not None, "unsupported_reason refuses other checkpoints"
        return cls(shape.four_bit)

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        """See Backend."""
        if shape.four_bit is None:
            return "the checkpoint does not store all experts in four bits in one format"
        widths = {
            "hidden size": shape.hidden_size,
            "expert width": shape.moe_intermediate_size,
        }
        for what, width in widths.items():
            if width % BLOCK:
                return f"it needs widths of a multiple of {BLOCK}, the {what} is {width}"
        return super().unsupported_reason(shape)

    @classmethod
    def auto_reason(cls, shape: BackendShape) -> str | None:
        """See Backend."""
        reason = super().auto_reason(shape)
        return None if reason is None or shape.four_bit is None else f"{reason} ({shape.four_bit})"

    def __init__(self, form: FourBitFormat):
        self.format = form

    def empty_weights(
        self,
        num_experts: int,
        rows: int,
        columns: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> FourBitWeights:
        """See GroupedGemm."""
        shape = (num_experts, rows, columns)
        return FourBitWeights.empty(self.format, *shape, device=device, tiled=self.tiled)
