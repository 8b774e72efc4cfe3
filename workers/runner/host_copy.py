"""Small results on their way from the device to the host, and how long the device worked for them.

On GPUs nothing here makes the host wait but `wait`: copies run on a stream of their own, into pinned memory, so that
they neither wait for the next step nor hold it up. On CPU everything is there at once.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch


class HostCopies:
    """What one step sends to the host: call it with each tensor once all of them are computed, then `wait`."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream = stream
        # Kept until they are copied, so that their memory is not used again before.
        self._sources: list[torch.Tensor] = []
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the host, filled when `wait` returns."""
        if self._stream is None:
            return tensor
        self._sources.append(tensor)
        with torch.cuda.stream(self._stream):
            return tensor.to("cpu", non_blocking=True)

    def finish(self) -> "HostCopies":
        """All have been given."""
        if self._stream is not None:
            self._done = self._stream.record_event()
        return self

    def wait(self) -> None:
        """Until the device has come so far."""
        if self._stream is not None:
            self._done.synchronize()
            self._sources.clear()


class StepClock:
    """Moments of one step, by the host's clock, or by the device's where that is a GPU."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event] | list[float] = []

    def mark(self) -> None:
        """Now, or when the device has come so far."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> Sequence[float]:
        """Between each two marks, which have all been reached."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._cuda:
            return [start.elapsed_time(end) / 1e3 for start, end in pairs]
        return [end - start for start, end in pairs]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device; on CPU its own memory. Does not wait, also not for what the device still has to do."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
