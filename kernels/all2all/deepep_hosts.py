"""DeepEP between hosts with 8 GPUs each: small steps in low-latency mode, larger steps in normal mode.

The plan of a step gives all ranks one number of rows, so all ranks take the same mode: up to `decode_rows`, which holds
every step of decodes, the low-latency mode, which CUDA graphs can hold; above, the normal mode, where a row travels
once to each host by RDMA, and there once to each rank by NVLink. Then the host waits for the numbers of rows that
arrive, because DeepEP has no buffers of a largest size there, so graphs hold no such step.

Both modes share one memory, see `deepep_buffer`. No ranks of several hosts have run this yet; `phalanx check
--all2all deepep --run` does so.

T tokens of this rank, N received rows, D hidden, K experts per token, R permuted rows.
"""

from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll, ExpertInput, MaskedInput
from kernels.all2all.deepep import DeepEpAllToAll, queue_bytes
from kernels.all2all.deepep_buffer import BufferSizes, SharedBuffer
from kernels.all2all.deepep_limits import (
    MAX_SMS,
    MIN_SMS_HOSTS,
    decode_rows,
    hosts_buffer_bytes,
    hosts_unsupported_reason,
    low_latency_rows,
)
from kernels.all2all.deepep_low_latency import DeepEpLowLatencyAllToAll
from kernels.all2all.deepep_package import DISTRIBUTIONS, load_deep_ep
from kernels.all2all.payload import Gathered
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.pending import Pending
from kernels.routing.permute import Permutation


class _NormalBetweenHosts(DeepEpAllToAll):
    """The normal mode in a shared buffer. Receive buffers have as many rows as arrive."""

    def __init__(self, shared: SharedBuffer, *args: Any, **options: Any):
        self._shared = shared
        super().__init__(*args, **options)

    @classmethod
    def granted_sms(cls, num_sms: int) -> int:
        return max(MIN_SMS_HOSTS, super().granted_sms(num_sms))

    def _open_buffer(self, hidden_size: int) -> Any:
        return self._shared.buffer

    def _worst_tokens(self, num_tokens: int) -> int:
        return 0

    def _before_launch(self) -> None:
        self._shared.receive()
        self._shared.overwrite_flags()

    def _return(self, sums_ND: torch.Tensor, way: Any) -> torch.Tensor:
        out_TD = super()._return(sums_ND, way)
        self._shared.clear_flags()  # here, because a replay of a graph calls nothing before its sends
        return out_TD

    def close(self) -> None:
        """Leave the buffer open: it belongs to `DeepEpHostsAllToAll`."""


class DeepEpHostsAllToAll(AllToAll):
    """Both modes of DeepEP in one buffer.

    group         8 ranks of each host, in the order of the hosts
    permutation   of this rank's experts by their local ids 0 .., int64
    max_decodes   rows of a rank up to which dispatches travel in low-latency mode
    fp8           rows of the normal mode travel in e4m3 with a scale for each 128 values
    masked_fp8    the same of the low-latency mode
    """

    name = "deepep_hosts"
    carries_adapters = False  # its kernels take -1 and ids of experts alone
    devices = ("cuda",)
    distributions = DISTRIBUTIONS
    layouts = ("contiguous", "masked")
    needs_equal_tokens = True
    graph = True
    sm_choices = DeepEpAllToAll.sm_choices
    fp8_rows = True

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        reason = DeepEpLowLatencyAllToAll.unavailable(device)
        return reason or super().unavailable(device)

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        return super().unsupported_reason(shape) or hosts_unsupported_reason(shape)

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        return hosts_buffer_bytes(shape)

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        return DeepEpAllToAll.step_bytes(shape)

    @classmethod
    def expert_rows(cls, shape: BackendShape) -> int:
        decodes = replace(shape, max_num_tokens=decode_rows(shape))
        return max(super().expert_rows(shape), DeepEpLowLatencyAllToAll.expert_rows(decodes))

    @classmethod
    def graph_rows(cls, shape: BackendShape) -> int:
        return decode_rows(shape)

    @classmethod
    def granted_sms(cls, num_sms: int) -> int:
        return _NormalBetweenHosts.granted_sms(num_sms)

    @classmethod
    def build(cls, context: BackendContext) -> Self:
        return cls(
            context.process_group(cls.name),
            context.permutation(torch.int64, range(len(context.local_slots))),
            num_experts=context.expert_map.num_slots,
            hidden_size=context.shape.hidden_size,
            max_decodes=decode_rows(context.shape),
            fp8=context.shape.fp8_rows,
            masked_fp8=context.masked_fp8,
            device=context.device,
        )

    def __init__(
        self,
        group: dist.ProcessGroup,
        permutation: Permutation,
        *,
        num_experts: int,
        hidden_size: int,
        max_decodes: int,
        fp8: bool,
        masked_fp8: bool,
        device: torch.device,
    ):
        self._max_decodes, self._device = low_latency_rows(max_decodes), device
        sizes_of = load_deep_ep().Buffer, group.size(), hidden_size
        self._shared = SharedBuffer.join(
            group,
            BufferSizes(
                self._max_decodes,
                hidden_size,
                num_experts,
                nvlink_bytes=queue_bytes("get_nvl_buffer_size_hint", *sizes_of),
                rdma_bytes=queue_bytes("get_rdma_buffer_size_hint", *sizes_of),
                num_queue_pairs=MAX_SMS,
            ),
        )
        sizes: dict[str, Any] = {"num_experts": num_experts, "hidden_size": hidden_size}
        self._normal = _NormalBetweenHosts(
            self._shared, group, permutation, **sizes, fp8=fp8, device=device
        )
        self._low_latency = DeepEpLowLatencyAllToAll(
            group,
            **sizes,
            max_num_tokens=self._max_decodes,
            use_fp8=masked_fp8,
            device=device,
        )

    def set_num_sms(self, num_sms: int | None) -> None:
        """Limit the SMs of the normal mode; the low-latency mode takes all SMs for a short time."""
        self._normal.set_num_sms(num_sms)

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput] | Pending[MaskedInput]:
        low_latency = len(x_TD) <= self._max_decodes
        mode: AllToAll = self._low_latency if low_latency else self._normal
        mode.stream = self.stream
        return mode.dispatch(x_TD, topk_idx_TK, topk_weights_TK)

    def combine(self, y_RD: torch.Tensor, handle: Any) -> Pending[torch.Tensor]:
        mode: AllToAll = self._normal if isinstance(handle, Gathered) else self._low_latency
        mode.stream = self.stream
        return mode.combine(y_RD, handle)

    def reset(self) -> None:
        """See AllToAll. The flags are clear again, because no combine of the ended step clears them."""
        self._shared.clear_flags()

    def abort(self) -> None:
        self._shared.abort()

    def close(self) -> None:
        self._low_latency.close()
        self._shared.leave(self._device)
