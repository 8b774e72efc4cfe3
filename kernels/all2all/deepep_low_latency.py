"""DeepEP's low-latency mode, for decodes: rows are sent directly into an array that each expert has for all rows.

One kernel sends, and another receives when the result is waited for; each uses nearly all SMs for a short time. Counts
stay on the device and may differ between ranks. Rows have the `masked` layout, in FP8 if the experts compute in it.
Combine applies the weights.

On a host without RDMA, NVSHMEM reports that its transport IBGDA failed, and uses NVLink. Between hosts rows travel by
RDMA, which the GPUs start themselves; no ranks of several hosts have run it yet.

T tokens of this rank, D hidden, K experts per token, e local experts, M rows of an expert's array.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll, MaskedInput
from kernels.all2all.deepep_buffer import BufferSizes, SharedBuffer
from kernels.all2all.deepep_limits import (
    low_latency_buffer_bytes,
    low_latency_rows,
    low_latency_unsupported_reason,
)
from kernels.all2all.deepep_package import (
    DISTRIBUTIONS,
    MIN_CAPABILITY,
    deep_ep_unavailable,
    nvshmem_unavailable,
)
from kernels.host.capability import too_old_gpu
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.pending import Pending


@dataclass(frozen=True)
class _Way:
    """The way back of the outputs: DeepEP's handle, and the experts and weights, which combine applies."""

    handle: Any
    topk_idx_TK: torch.Tensor
    topk_weights_TK: torch.Tensor


class DeepEpLowLatencyAllToAll(AllToAll):
    """`Buffer.low_latency_dispatch` and `low_latency_combine`, with receive hooks.

    max_num_tokens   most rows of a rank in one dispatch; ranks may dispatch fewer, or none
    use_fp8          rows arrive in e4m3 with a scale for each 128 values
    """

    name = "deepep_low_latency"
    carries_adapters = False  # its kernels take -1 and ids of experts alone
    devices = ("cuda",)
    distributions = DISTRIBUTIONS
    layouts = ("masked",)
    graph = True

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        reason = too_old_gpu(device, MIN_CAPABILITY) or deep_ep_unavailable()
        return reason or nvshmem_unavailable()

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        return super().unsupported_reason(shape) or low_latency_unsupported_reason(shape)

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        return low_latency_buffer_bytes(shape.hidden_size, shape.num_experts, shape.max_num_tokens)

    @classmethod
    def expert_rows(cls, shape: BackendShape) -> int:
        return shape.num_experts * low_latency_rows(shape.max_num_tokens)

    @classmethod
    def build(cls, context: BackendContext) -> Self:
        return cls(
            context.process_group(cls.name),
            num_experts=context.expert_map.num_slots,
            hidden_size=context.shape.hidden_size,
            max_num_tokens=context.shape.max_num_tokens,
            use_fp8=context.masked_fp8,
            device=context.device,
        )

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        num_experts: int,
        hidden_size: int,
        max_num_tokens: int,
        use_fp8: bool,
        device: torch.device,
    ):
        self._num_ranks, self._num_experts, self._use_fp8 = group.size(), num_experts, use_fp8
        self._device = device
        sizes = BufferSizes(low_latency_rows(max_num_tokens), hidden_size, num_experts)
        self._shared = SharedBuffer.join(group, sizes)

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[MaskedInput]:
        max_rows = self._shared.sizes.max_rows
        assert len(x_TD) <= max_rows, (len(x_TD), max_rows)
        topk_idx_TK = topk_idx_TK.to(self._shared.topk_idx_dtype).contiguous()
        (received, counts_e, handle, _), outstanding = self._shared.send(
            self.stream,
            self._shared.buffer.low_latency_dispatch,
            x_TD.contiguous(),
            topk_idx_TK,
            max_rows,
            self._num_experts,
            use_fp8=self._use_fp8,
        )
        x_eMD, scale_eMS = received if self._use_fp8 else (received, None)
        way = _Way(handle, topk_idx_TK, topk_weights_TK.contiguous())
        expected = max(1, self._num_ranks * topk_idx_TK.numel() // self._num_experts)

        def finish() -> MaskedInput:
            outstanding.wait()
            return MaskedInput(x_eMD, scale_eMS, counts_e, expected, way)

        return Pending(finish)

    def combine(self, y_eMD: torch.Tensor, handle: _Way) -> Pending[torch.Tensor]:
        (out_TD, _), outstanding = self._shared.send(
            self.stream,
            self._shared.buffer.low_latency_combine,
            y_eMD,
            handle.topk_idx_TK,
            handle.topk_weights_TK,
            handle.handle,
        )

        def finish() -> torch.Tensor:
            outstanding.wait()
            result: torch.Tensor = out_TD
            return result

        return Pending(finish)

    def abort(self) -> None:
        self._shared.abort()

    def close(self) -> None:
        self._shared.leave(self._device)
