"""Copies of small results from the device to the host, and the device time of a step's parts.

On GPUs only `wait` and `seconds` make the host wait: copies run on a stream of their own, into pinned memory, so that
they neither wait for the next step nor delay it. On CPU there is nothing to copy.
"""

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from kernels.host.waits import waiting

# CUDA copies as much out of pageable memory before the call returns, and waits for no earlier work of the device. Then
# a copy of the host into pinned memory would only add 20 us.
MAX_PAGEABLE_BYTES = 2**16


def blocking_event(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    """Return an event behind the work that a stream has by now. None: the current stream.

    A thread that waits for it sleeps, and leaves its core to others.
    """
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    if stream is None:
        event.record()
    else:
        event.record(stream)
    return event


class HostCopies:
    """The copies of one step: call it with each tensor once all tensors are computed, then `finish`, then `wait`."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream = stream
        # With their sources, which are kept until the copies end, so that their memory is not used again before.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the host; it is filled when `wait` returns."""
        if self._stream is None:
            return tensor
        found = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copies.append((found, tensor))
        return found

    def finish(self) -> "HostCopies":
        """Start all copies, behind what the current stream has by now; call it after the last tensor."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                for found, tensor in self._copies:
                    found.copy_(tensor, non_blocking=True)
            self._done = self._stream.record_event()
        return self

    def wait(self) -> None:
        """Wait for the copies."""
        if self._stream is not None:
            with waiting():
                self._done.synchronize()
            self._copies.clear()


class StepClock:
    """Moments of one step by the host's clock; on a GPU by that of the device, on the stream that is current now."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Record this moment; on a GPU, the moment at which the device reaches it."""
        if self._stream is not None:
            event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> Sequence[float]:
        """Return the time between each two moments; the device must have reached all of them."""
        if self._stream is not None:
            return [start.elapsed_time(end) / 1e3 for start, end in pairwise(self._events)]
        return [end - start for start, end in pairwise(self._times)]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array on the device; on CPU its own memory. Does not wait for the device."""
    return _source(array, device).to(device, non_blocking=True)


def fill(target: torch.Tensor, array: np.ndarray) -> None:
    """Copy the array into a tensor of its shape on a device, or on the CPU. Does not wait for the device."""
    target.copy_(_source(array, target.device), non_blocking=True)


def _source(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array in memory of which a copy does not wait for the device."""
    host = torch.from_numpy(array)
    pageable = device.type == "cpu" or host.nbytes <= MAX_PAGEABLE_BYTES
    return host if pageable else host.pin_memory()
