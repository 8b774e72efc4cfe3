"""DeepEP's low-latency mode, for decodes: rows are sent directly into an array that each expert has for all rows.

One kernel sends, and another receives when the result is waited for; each uses nearly all SMs for a short time. Counts
stay on the device and may differ between ranks. Rows have the `masked` layout, in FP8 if the experts compute in it.
Combine applies the weights.

DeepEP alternates between two buffers, and a send clears the flags of the other buffer: so a send first receives an
outstanding one. A process has one NVSHMEM, which ends with the first buffer that is destroyed: so all instances of a
group share one buffer. On a host without RDMA, NVSHMEM reports that its transport IBGDA failed, and uses NVLink.

T tokens of this rank, D hidden, K experts per token, e local experts, M rows of an expert's array.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll, MaskedInput
from kernels.all2all.comm_stream import CommStream, StreamEvent, on_comm_stream
from kernels.all2all.deepep import (
    DISTRIBUTIONS,
    MIN_CAPABILITY,
    deep_ep_unavailable,
    installed_version,
    load_deep_ep,
    peers_are_here,
)
from kernels.all2all.deepep_limits import (
    low_latency_buffer_bytes,
    low_latency_rows,
    low_latency_unsupported_reason,
    unsupported_reason,
)
from kernels.host.capability import too_old_gpu
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.pending import Pending

MIN_QUEUE_DEPTH = 1024  # DeepEP's default for RDMA work requests


@dataclass(frozen=True)
class _Way:
    """The way back of the outputs: DeepEP's handle, and the experts and weights, which combine applies."""

    handle: Any
    topk_idx_TK: torch.Tensor
    topk_weights_TK: torch.Tensor


class _Outstanding:
    """A send without its receive. `receive` receives the rows once, on the stream of the send."""

    def __init__(self, hook: Callable[[], None], stream: CommStream | None, inputs: Any):
        self._hook: Callable[[], None] | None = hook
        self._stream, self._inputs = stream, inputs
        self._event: StreamEvent | None = None

    def receive(self) -> None:
        if self._hook is not None:
            hook, self._hook = self._hook, None
            hook()
            self._event = StreamEvent(self._stream, self._inputs)
            self._inputs = None

    def wait(self) -> None:
        """Receive, and make the current stream wait for the rows."""
        self.receive()
        assert self._event is not None
        self._event.wait()


class _SharedBuffer:
    """The `Buffer` of a group in this process, and its last send. A rank sends at most `max_rows` rows at once."""

    def __init__(self, group: dist.ProcessGroup, max_rows: int, hidden_size: int, num_experts: int):
        self._group, self._widths = group, (hidden_size, num_experts)
        self.max_rows = max_rows
        deep_ep, num_ranks = load_deep_ep(), group.size()
        depth = max(MIN_QUEUE_DEPTH, 1 << (2 * max_rows + 1).bit_length())
        os.environ.setdefault("NVSHMEM_QP_DEPTH", str(depth))
        self.topk_idx_dtype = getattr(deep_ep, "topk_idx_t", torch.int64)
        self.buffer = deep_ep.Buffer(
            group,
            num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(
                max_rows, hidden_size, num_ranks, num_experts
            ),
            low_latency_mode=True,
            num_qps_per_rank=num_experts // num_ranks,
            explicitly_destroy=True,
        )
        self._last: _Outstanding | None = None
        self._users = 0

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, max_rows: int, hidden_size: int, num_experts: int
    ) -> "_SharedBuffer":
        """Return the buffer of this process, built for its first user. All ranks call it in the same order."""
        widths = (hidden_size, num_experts)
        if not _in_use:
            _in_use.append(cls(group, max_rows, *widths))
        shared = _in_use[0]
        assert shared._group is group and shared._widths == widths, (shared._widths, widths)
        assert max_rows <= shared.max_rows, (
            f"the buffer is for {shared.max_rows} rows, not for {max_rows}"
        )
        shared._users += 1
        return shared

    def leave(self, device: torch.device) -> None:
        """Destroy the buffer after its last user has left, together with the other ranks."""
        self._users -= 1
        if self._users == 0:
            _in_use.remove(self)
            if peers_are_here(self._group, device):
                self.buffer.destroy()

    def send(
        self,
        stream: CommStream | None,
        launch: Callable[..., tuple[Any, ...]],
        *inputs: Any,
        **options: Any,
    ) -> tuple[list[Any], _Outstanding]:
        """Run `launch`, which returns the receive hook last; return its other results, and the send."""
        if self._last is not None:
            self._last.receive()
        with on_comm_stream(stream):
            *results, hook = launch(*inputs, return_recv_hook=True, **options)
        self._last = _Outstanding(hook, stream, inputs)
        return results, self._last


_in_use: list[_SharedBuffer] = []  # one at most


class DeepEpLowLatencyAllToAll(AllToAll):
    """`Buffer.low_latency_dispatch` and `low_latency_combine`, with receive hooks.

    max_num_tokens   most rows of a rank in one dispatch; ranks may dispatch fewer, or none
    use_fp8          rows arrive in e4m3 with a scale for each 128 values
    """

    name = "deepep_low_latency"
    carries_adapters = False  # its kernels take -1 and ids of experts alone
    devices = ("cuda",)
    distributions = DISTRIBUTIONS
    layout = "masked"
    one_host = True
    graph = True

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        reason = too_old_gpu(device, MIN_CAPABILITY) or deep_ep_unavailable()
        if reason is None and not _has_nvshmem():
            reason = f"deep_ep {installed_version()} was built without NVSHMEM, which it needs"
        return reason

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        reason = super().unsupported_reason(shape) or unsupported_reason(shape)
        return reason or low_latency_unsupported_reason(shape)

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
        max_rows = low_latency_rows(max_num_tokens)
        self._shared = _SharedBuffer.join(group, max_rows, hidden_size, num_experts)

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[MaskedInput]:
        max_rows = self._shared.max_rows
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

    def close(self) -> None:
        self._shared.leave(self._device)


def _has_nvshmem() -> bool:
    """Return whether the extension of 1.2.1 was built with NVSHMEM; one without names that in its assertions alone."""
    extension = getattr(sys.modules.get("deep_ep_cpp"), "__file__", None)
    return extension is None or b"NVSHMEM is disabled" not in Path(extension).read_bytes()
