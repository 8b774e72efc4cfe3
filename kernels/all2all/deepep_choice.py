"""DeepEP's two modes as `kernels.backends.select` sees them: what is missing, how they are built, what they keep."""

import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll
from kernels.all2all.deepep import DeepEpAllToAll, missing, recognised
from kernels.all2all.deepep_limits import (
    NAMES,
    low_latency_buffer_bytes,
    low_latency_rows,
    normal_buffer_bytes,
    unsupported_reason,
)
from kernels.all2all.deepep_low_latency import DeepEpLowLatencyAllToAll
from kernels.grouped_gemm.base import GroupedGemm
from kernels.routing.permute import Permutation
from kernels.routing.placement import ExpertPlacement

__all__ = [
    "EXCHANGES",
    "LOW_LATENCY",
    "NAMES",
    "NORMAL",
    "build",
    "kept_bytes",
    "low_latency_rows",
    "missing",
    "recognised",
    "unsupported_reason",
]

NORMAL, LOW_LATENCY = NAMES
EXCHANGES: dict[str, type[AllToAll]] = {
    NORMAL: DeepEpAllToAll,
    LOW_LATENCY: DeepEpLowLatencyAllToAll,
}


def build(
    name: str,
    group: dist.ProcessGroup | None,
    placement: ExpertPlacement,
    grouped_gemm: GroupedGemm,
    *,
    device: torch.device,
    hidden_size: int,
    max_num_tokens: int,
) -> AllToAll:
    """The exchange of this process's rank, on its current device; collective."""
    assert group is not None, f"{name} needs a process group"
    num_experts = placement.num_experts
    if name == LOW_LATENCY:
        return DeepEpLowLatencyAllToAll(
            group,
            num_experts=num_experts,
            hidden_size=hidden_size,
            max_num_tokens=max_num_tokens,
            use_fp8=grouped_gemm.masked_fp8,
            device=device,
        )
    local_ids = range(len(placement.local_experts(group.rank())))
    order = Permutation(
        local_ids,
        num_experts=num_experts,
        device=device,
        dtype=torch.int64,
        alignment=grouped_gemm.row_alignment,
    )
    return DeepEpAllToAll(
        group, order, num_experts=num_experts, hidden_size=hidden_size, device=device
    )


def kept_bytes(
    name: str, *, num_ranks: int, hidden_size: int, max_num_tokens: int, num_experts: int
) -> int:
    """Bytes of a rank's buffers from the start to the end, nearly."""
    if name == LOW_LATENCY:
        return low_latency_buffer_bytes(hidden_size, num_experts, max_num_tokens)
    return normal_buffer_bytes(hidden_size, num_ranks)
