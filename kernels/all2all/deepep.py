"""DeepEP's normal mode: a row is sent once to each rank that has any of its experts, over NVLink, on few SMs.

The host never waits: receive buffers have the largest possible number of rows (`num_worst_tokens`). So all ranks must
dispatch the same number of rows, and CUDA graphs can hold dispatch and combine. Our own kernels permute received rows
and apply the weights, because DeepEP's combine only adds. For experts that compute with FP8, rows are quantised before
they travel; sums travel in bfloat16.

`Buffer` of DeepEP 1.2.1 is tested. DeepEP 2.x has the same class, and was never run here.

T tokens of this rank, N = ranks * T received rows, D hidden, K experts per token, R permuted rows.
"""

import functools
import inspect
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Self

import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.comm_stream import StreamEvent, on_comm_stream
from kernels.all2all.deepep_limits import (
    MAX_SMS,
    normal_buffer_bytes,
    normal_unsupported_reason,
    unsupported_reason,
)
from kernels.all2all.payload import Gathered, RowFormat, permute_local, quantise
from kernels.block_fp8 import Fp8Rows
from kernels.host.capability import too_old_gpu
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.pending import Pending
from kernels.routing.permute import Permutation

NEEDED_VERSION = "1.2.1"
MIN_CAPABILITY = (9, 0)
DISTRIBUTIONS = ("deep_ep", "sgl-deep-ep")
NEEDED = {  # method of Buffer to a parameter that early versions lack
    "__init__": "explicitly_destroy",
    "dispatch": "num_worst_tokens",
    "combine": "config",
    "get_dispatch_layout": "num_experts",
    "low_latency_dispatch": "return_recv_hook",
    "low_latency_combine": "return_recv_hook",
}
CLOSE_TIMEOUT_S = 5.0


class DeepEpUnavailableError(RuntimeError):
    """DeepEP cannot be used here. The message has the reason, the version found and the version needed."""


def load_deep_ep() -> Any:
    """Return the module `deep_ep`. Raises DeepEpUnavailableError where it is missing, broken or too old."""
    needed = f"{NEEDED_VERSION} or newer is needed"
    if "deep_ep" not in sys.modules and find_spec("deep_ep") is None:
        raise DeepEpUnavailableError(f"deep_ep is not installed, {needed}")
    try:
        import deep_ep
    except Exception as error:  # assertions about NCCL and CUDA_HOME, undefined symbols, no GPU
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise DeepEpUnavailableError(
            f"import deep_ep failed ({installed_version()} is installed, {needed}): {said[0]}"
        ) from error
    buffer = getattr(deep_ep, "Buffer", None)
    lacking = [
        f"Buffer.{method}({parameter})"
        for method, parameter in NEEDED.items()
        if parameter not in _parameters(getattr(buffer, method, None))
    ]
    if lacking:
        raise DeepEpUnavailableError(
            f"deep_ep {installed_version()} is installed, {needed}: it has no {', '.join(lacking)}"
        )
    return deep_ep


@functools.cache
def deep_ep_unavailable() -> str | None:
    """Return why the package cannot be used, or None."""
    try:
        load_deep_ep()
    except DeepEpUnavailableError as error:
        return str(error)
    return None


def peers_are_here(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether all ranks call this within CLOSE_TIMEOUT_S. DeepEP would wait 100 s for a dead rank."""
    try:
        work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while not work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        work.wait()  # raises if a peer failed
    except RuntimeError:
        return False
    return True


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
        reason = super().unsupported_reason(shape) or unsupported_reason(shape)
        return reason or normal_unsupported_reason(shape)

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
        num_bytes = max(
            config.get_nvl_buffer_size_hint(2 * hidden_size, self._num_ranks)
            for config in self._configs
        )
        self._buffer = self._deep_ep.Buffer(group, num_bytes, explicitly_destroy=True)

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
        with on_comm_stream(self.stream):
            out_TD, _, _ = self._buffer.combine(sums_ND, way.handle, config=way.combine_config)
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
        num_rows = self._num_ranks * len(topk_idx_TK)
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
            num_worst_tokens=num_rows,
            config=dispatch_config,
        )
        rows_ND = Fp8Rows(*x_ND) if self._fp8 else x_ND
        return rows_ND, topk_idx_NK, topk_weights_NK, _Way(handle, combine_config)


def _parameters(function: Any) -> tuple[str, ...]:
    return () if function is None else tuple(inspect.signature(function).parameters)


def installed_version() -> str:
    """Return the version of the installed distribution of deep_ep."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return str(getattr(sys.modules.get("deep_ep"), "__version__", "an unknown version"))
