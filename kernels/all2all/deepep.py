"""DeepEP's normal mode: a row is sent once to each rank that has any of its experts, over NVLink, on few SMs.

The host never waits: receive buffers have the largest possible number of rows (`num_worst_tokens`). So all ranks must
dispatch the same number of rows, and CUDA graphs can hold dispatch and combine. Our own kernels permute received rows
and apply the weights, because DeepEP's combine only adds. For experts that compute with FP8, rows are quantised before
they travel; sums travel in bfloat16.

T tokens of this rank, N = ranks * T received rows, D hidden, K experts per token, R permuted rows.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.comm_stream import StreamEvent, on_comm_stream
from kernels.all2all.deepep_limits import (
    MAX_SMS,
    normal_buffer_bytes,
    one_host_unsupported_reason,
)
from kernels.all2all.deepep_package import (
    DISTRIBUTIONS,
    MIN_CAPABILITY,
    deep_ep_unavailable,
    load_deep_ep,
    peers_are_here,
)
from kernels.all2all.payload import Gathered, RowFormat, permute_local, quantise
from kernels.block_fp8 import Fp8Rows
from kernels.host.capability import too_old_gpu
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.pending import Pending
from kernels.routing.permute import Permutation


@dataclass(frozen=True)
class _Way:
    """The way back of the sums: DeepEP's handle of the dispatch, and the combine configuration for its SMs."""

    handle: Any
    combine_config: Any


class DeepEpAllToAll(AllToAll):
    """`Buffer.dispatch` and `Buffer.combine` in one host's NVLink domain.

    group         2, 4 or 8 ranks; their GPUs can access each other's memory
    permutation   of this rank's experts by their local ids 0 .., int64
    fp8           rows travel in e4m3 with a scale for each 128 values
    """

    name = "deepep"
    carries_adapters = False  # its kernels take -1 and ids of experts alone
    devices = ("cuda",)
    distributions = DISTRIBUTIONS
    needs_equal_tokens = True
    one_host = True
    graph = True
    sm_choices = (8, 16, 20, 24, 32)
    runs_on_stream = True
    fp8_rows = True

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        reason = too_old_gpu(device, MIN_CAPABILITY) or deep_ep_unavailable()
        return reason or super().unavailable(device)

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        return super().unsupported_reason(shape) or one_host_unsupported_reason(shape)

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        return normal_buffer_bytes(shape.hidden_size, shape.num_ranks)

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        rows = (shape.num_ranks + 1) * shape.max_num_tokens
        return rows * RowFormat.of(shape).row_and_sum_bytes

    @classmethod
    def build(cls, context: BackendContext) -> Self:
        return cls(
            context.process_group(cls.name),
            context.permutation(torch.int64, range(len(context.local_slots))),
            num_experts=context.expert_map.num_slots,
            hidden_size=context.shape.hidden_size,
            fp8=context.shape.fp8_rows,
            device=context.device,
        )

    def __init__(
        self,
        group: dist.ProcessGroup,
        permutation: Permutation,
        *,
        num_experts: int,
        hidden_size: int,
        fp8: bool,
        device: torch.device,
    ):
        self._deep_ep, self._group, self._permutation = load_deep_ep(), group, permutation
        self._device, self._fp8 = device, fp8
        self._num_ranks, self._num_experts = group.size(), num_experts
        self._topk_idx_dtype = getattr(self._deep_ep, "topk_idx_t", torch.int64)
        self.set_num_sms(None)
        self._buffer = self._open_buffer(hidden_size)

    def _open_buffer(self, hidden_size: int) -> Any:
        """Return the `Buffer` of this instance. Collective."""
        sizes = self._num_ranks, hidden_size
        num_bytes = queue_bytes("get_nvl_buffer_size_hint", self._deep_ep.Buffer, *sizes)
        return self._deep_ep.Buffer(self._group, num_bytes, explicitly_destroy=True)

    def _before_launch(self) -> None:
        """Prepare the buffer for a dispatch or a combine."""

    @classmethod
    def granted_sms(cls, num_sms: int) -> int:
        """Return an even number, because a channel takes two SMs, of at most MAX_SMS."""
        assert num_sms > 0, num_sms
        return max(2, min(num_sms, MAX_SMS) // 2 * 2)

    def set_num_sms(self, num_sms: int | None) -> None:
        """Limit the SMs from the next dispatch on; None for MAX_SMS.

        Two H200, 4096 tokens each, hidden 2048, top-8 of 128: dispatch and combine take 602 + 444 us on 8 SMs,
        340 + 248 on 16, 251 + 178 on 24, 204 + 140 on 32; up to 32 tokens 29 + 20 us on any number.
        """
        buffer = self._deep_ep.Buffer
        # DeepEP keeps the number on the class and reads it only when a Config is made.
        buffer.set_num_sms(MAX_SMS if num_sms is None else self.granted_sms(num_sms))
        self._configs = (
            buffer.get_dispatch_config(self._num_ranks),
            buffer.get_combine_config(self._num_ranks),
        )

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        inputs = (
            quantise(x_TD) if self._fp8 else x_TD.contiguous(),
            topk_idx_TK.to(self._topk_idx_dtype).contiguous(),
            topk_weights_TK.contiguous(),
        )
        if not len(x_TD):  # then on all ranks
            return Pending.ready(permute_local(*inputs, self._permutation, None))
        self._before_launch()
        with on_comm_stream(self.stream):
            received = self._send(*inputs)
        sent = StreamEvent(self.stream, inputs)

        def finish() -> ExpertInput:
            sent.wait()
            return permute_local(*received[:3], self._permutation, received[3])

        return Pending(finish)

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        way: _Way | None = handle.origin
        sums_ND = handle.partial_sums(y_RD)
        if way is None:
            return Pending.ready(sums_ND)
        self._before_launch()
        with on_comm_stream(self.stream):
            out_TD = self._return(sums_ND, way)
        sent = StreamEvent(self.stream, sums_ND, way)

        def finish() -> torch.Tensor:
            sent.wait()
            result: torch.Tensor = out_TD
            return result

        return Pending(finish)

    def close(self) -> None:
        if peers_are_here(self._group, self._device):
            self._buffer.destroy()

    def _send(
        self,
        x_TD: torch.Tensor | Fp8Rows,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
    ) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor, torch.Tensor, _Way]:
        """Return x_ND, local topk_idx_NK (-1 in unused rows), topk_weights_NK, and the way back."""
        dispatch_config, combine_config = self._configs
        per_rank, per_rdma_rank, per_expert, in_rank_TR, _ = self._buffer.get_dispatch_layout(
            topk_idx_TK, self._num_experts
        )
        x_ND, topk_idx_NK, topk_weights_NK, _, handle, _ = self._buffer.dispatch(
            x_TD,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank_TR,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx_TK,
            topk_weights=topk_weights_TK,
            num_worst_tokens=self._worst_tokens(len(topk_idx_TK)),
            config=dispatch_config,
        )
        rows_ND = Fp8Rows(*x_ND) if self._fp8 else x_ND
        return rows_ND, topk_idx_NK, topk_weights_NK, _Way(handle, combine_config)

    def _worst_tokens(self, num_tokens: int) -> int:
        """Return the rows of the receive buffers of a dispatch; 0: the host waits for the number of rows."""
        return self._num_ranks * num_tokens

    def _return(self, sums_ND: torch.Tensor, way: _Way) -> torch.Tensor:
        """Return out_TD: the sums of each token over the ranks that it was sent to."""
        out_TD: torch.Tensor
        out_TD, _, _ = self._buffer.combine(sums_ND, way.handle, config=way.combine_config)
        return out_TD


def queue_bytes(hint: str, buffer_class: Any, num_ranks: int, hidden_size: int) -> int:
    """Return the bytes of a rank's queues at MAX_SMS.

    hint   method of DeepEP's configurations: of the queues between the GPUs of a host, or of those between hosts, which
           builds without NVSHMEM refuse
    """
    buffer_class.set_num_sms(MAX_SMS)
    configs = (
        buffer_class.get_dispatch_config(num_ranks),
        buffer_class.get_combine_config(num_ranks),
    )
    return max(int(getattr(config, hint)(2 * hidden_size, num_ranks)) for config in configs)
