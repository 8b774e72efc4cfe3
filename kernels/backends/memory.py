"""How much memory the chosen backends of one rank take, by arithmetic: for `phalanx check`, which starts nothing."""

from dataclasses import dataclass

import torch

from kernels.all2all import choice as exchanges
from kernels.all2all import deepep_choice
from kernels.all2all.payload import RowFormat
from kernels.backends.select import Selection
from kernels.grouped_gemm import choice as gemms


@dataclass(frozen=True)
class BackendMemory:
    """Bytes of one rank.

    kept     what the backends of whole steps hold from the start to the end
    slices   the same of all slices of a step
    step     rows, sums and the experts' activations of one full step; slices share it
    """

    kept: int
    slices: int
    step: int

    @property
    def total(self) -> int:
        return self.kept + self.slices + self.step


def backend_memory(
    selection: Selection,
    *,
    num_ranks: int,
    dtype: torch.dtype,
    hidden_size: int,
    expert_width: int,
    top_k: int,
    max_num_tokens: int,
    num_experts: int = 0,
    num_ubatches: int = 0,
) -> BackendMemory:
    """What steps of up to `max_num_tokens` tokens of each rank take; num_experts for DeepEP alone.

    Balanced routing, except for GPUs' own products: their shapes are those of the most rows there can be. What is held
    outside the exchange and attention's workspace (which may be larger than counted before Hopper) is left out.
    """
    name, row_format = selection.all2all.name, RowFormat(hidden_size, top_k, dtype)

    def exchange(tokens: int) -> int:
        return exchanges.kept_bytes(
            name,
            row_format,
            num_ranks=num_ranks,
            max_num_tokens=tokens,
            num_experts=num_experts,
        )

    workspace = selection.attention_backend.kept_bytes
    slices = num_ubatches * workspace
    if num_ubatches and name != "shm":  # whose slices take the slots of whole steps
        slices += num_ubatches * exchange(-(-max_num_tokens // num_ubatches))
    routed_rows, widths = max_num_tokens * top_k, 2 * hidden_size + 3 * expert_width
    if selection.grouped_gemm.name in gemms.ON_DEVICE:
        routed_rows *= num_ranks
        if selection.grouped_gemm.name == "triton":  # neither copies rows nor stores gate and up
            widths = hidden_size + expert_width
    if name == deepep_choice.LOW_LATENCY:
        routed_rows = num_experts * deepep_choice.low_latency_rows(max_num_tokens)
    activations = routed_rows * widths * dtype.itemsize
    rows = exchanges.step_bytes(
        name, row_format, num_ranks=num_ranks, max_num_tokens=max_num_tokens
    )
    return BackendMemory(workspace + exchange(max_num_tokens), slices, rows + activations)
