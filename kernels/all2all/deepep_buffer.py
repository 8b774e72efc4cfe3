"""The DeepEP `Buffer` that all all-to-alls of a process share, where one of them sends in low-latency mode.

A process has one NVSHMEM, which ends with the first buffer that is destroyed: so all instances of a group share one
buffer. In low-latency mode DeepEP alternates between two halves of it, and a send clears the flags of the other half:
so a send first receives an outstanding one. The normal mode between hosts writes to the same memory as these flags, so
they are cleared behind it, with a barrier of all ranks on the device.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from kernels.all2all.comm_stream import CommStream, StreamEvent, on_comm_stream
from kernels.all2all.deepep_package import load_deep_ep, peers_are_here

MIN_QUEUE_DEPTH = 1024  # DeepEP's default for RDMA work requests


@dataclass(frozen=True)
class BufferSizes:
    """What a buffer is for; equal on all ranks.

    max_rows              most rows that a rank sends at once in low-latency mode
    nvlink_bytes          of the queues of the normal mode between the GPUs of a host; 0: no normal mode
    rdma_bytes            of the queues of the normal mode between hosts
    num_queue_pairs       RDMA queue pairs of a rank towards each peer, at least one for each local expert
    """

    max_rows: int
    hidden_size: int
    num_experts: int
    nvlink_bytes: int = 0
    rdma_bytes: int = 0
    num_queue_pairs: int = 0

    def holds(self, wanted: "BufferSizes") -> bool:
        """Return whether a buffer of these sizes serves an instance that wants `wanted`."""
        mine = self.hidden_size, self.num_experts
        return mine == (wanted.hidden_size, wanted.num_experts) and all(
            getattr(self, name) >= getattr(wanted, name)
            for name in ("max_rows", "nvlink_bytes", "rdma_bytes", "num_queue_pairs")
        )


class Outstanding:
    """A send without its receive. `receive` receives the rows once, on the stream of the send."""

    def __init__(self, hook: Callable[[], None], stream: CommStream | None, inputs: Any):
        self._hook: Callable[[], None] | None = hook
        self._stream, self._inputs = stream, inputs
        self._event: StreamEvent | None = None

    def receive(self) -> None:
        """Receive the rows, if they are not received yet."""
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


class SharedBuffer:
    """The `Buffer` of a group in this process, and its last send in low-latency mode."""

    _open: ClassVar[list["SharedBuffer"]] = []  # one at most

    def __init__(self, group: dist.ProcessGroup, sizes: BufferSizes):
        self._group, self.sizes = group, sizes
        deep_ep, num_ranks = load_deep_ep(), group.size()
        depth = max(MIN_QUEUE_DEPTH, 1 << (2 * sizes.max_rows + 1).bit_length())
        os.environ.setdefault("NVSHMEM_QP_DEPTH", str(depth))
        self.topk_idx_dtype = getattr(deep_ep, "topk_idx_t", torch.int64)
        low_latency_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            sizes.max_rows, sizes.hidden_size, num_ranks, sizes.num_experts
        )
        self.buffer = deep_ep.Buffer(
            group,
            num_nvl_bytes=sizes.nvlink_bytes,
            num_rdma_bytes=max(low_latency_bytes, sizes.rdma_bytes),
            low_latency_mode=True,
            num_qps_per_rank=max(sizes.num_experts // num_ranks, sizes.num_queue_pairs),
            explicitly_destroy=True,
        )
        self._last: Outstanding | None = None
        self._flags_overwritten = self._aborted = False
        self._users = 0

    @classmethod
    def join(cls, group: dist.ProcessGroup, sizes: BufferSizes) -> "SharedBuffer":
        """Return the buffer of this process, built for its first user. All ranks call it in the same order."""
        if not cls._open:
            cls._open.append(cls(group, sizes))
        shared = cls._open[0]
        assert shared._group is group, "the buffer of another group is open"
        assert shared.sizes.holds(sizes), f"the buffer is for {shared.sizes}, not for {sizes}"
        shared._users += 1
        return shared

    def leave(self, device: torch.device) -> None:
        """Destroy the buffer after its last user has left, together with the other ranks."""
        self._users -= 1
        if self._users == 0:
            self._open.remove(self)
            if peers_are_here(self._group, device):
                self.buffer.destroy()

    def abort(self) -> None:
        """Refuse all further sends, from any thread. DeepEP ends waits that have begun after 100 s."""
        self._aborted = True

    def send(
        self,
        stream: CommStream | None,
        launch: Callable[..., tuple[Any, ...]],
        *inputs: Any,
        **options: Any,
    ) -> tuple[list[Any], Outstanding]:
        """Run `launch`, which returns the receive hook last; return its other results, and the send."""
        self.receive()
        with on_comm_stream(stream):
            self.clear_flags()
            *results, hook = launch(*inputs, return_recv_hook=True, **options)
        self._last = Outstanding(hook, stream, inputs)
        return results, self._last

    def receive(self) -> None:
        """Receive an outstanding send of the low-latency mode. Raises RuntimeError after `abort`."""
        if self._aborted:
            raise RuntimeError("the all-to-all was aborted, and sends nothing more")
        if self._last is not None:
            self._last.receive()

    def overwrite_flags(self) -> None:
        """Note that the normal mode has used the memory of the low-latency mode."""
        self._flags_overwritten = True

    def clear_flags(self) -> None:
        """Clear the flags of the low-latency mode where the normal mode has overwritten them. Collective.

        Nothing is outstanding then: a launch of the normal mode is behind a receive, and a send behind this call.
        """
        if self._flags_overwritten and not self._aborted:
            sizes, self._flags_overwritten = self.sizes, False
            self.buffer.clean_low_latency_buffer(
                sizes.max_rows, sizes.hidden_size, sizes.num_experts
            )
