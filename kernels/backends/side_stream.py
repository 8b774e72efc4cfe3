"""Work on a second stream while a CUDA graph is captured: the graph runs it beside the kernels of the current stream.

A step of few rows is a chain of short kernels that leave most SMs idle. Without a graph the host launches each kernel,
and a second stream would cost it two events for each work. Knows nothing of the work.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import TypeVar

import torch

from kernels.all2all.comm_stream import CommStream, StreamEvent, comm_streams
from kernels.pending import can_yield_ubatch

T = TypeVar("T")

# With more rows each kernel fills the SMs, so that two at once gain nothing and hold more memory.
MOST_ROWS = 1024


class SideWork:
    """Work behind all that the current stream has at this object's creation.

    Tensors that the work makes need no `record_stream`, as in `kernels.all2all.comm_stream`. A kernel behind the fork
    or the join may start early (`kernels.triton.pdl`): it waits for all kernels that the graph puts before it.
    """

    def __init__(self, device: torch.device, num_rows: int, *, allowed: bool = True):
        """num_rows: of the work; allowed: False: the work runs on the current stream, where `run` is called."""
        self._stream = _side_stream(device, num_rows) if allowed else None
        self._event = StreamEvent(None)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def run(self, work: Callable[..., T], *inputs: object) -> T:
        """Return work(*inputs), which the current stream may read after `wait`. The inputs stay alive until then."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            result = work(*inputs)
        self._event = StreamEvent(self._stream, inputs)
        return result

    def wait(self) -> None:
        """Make the current stream wait for the work, not the host."""
        self._event.wait()


def _side_stream(device: torch.device, num_rows: int) -> CommStream | None:
    """Return the stream of such work, None for the current one.

    In ubatches it is the current one, because the kernels of another ubatch use the idle SMs.
    """
    if device.type != "cuda" or num_rows > MOST_ROWS or can_yield_ubatch():
        return None
    return _stream(device) if torch.cuda.is_current_stream_capturing() else None


@cache
def _stream(device: torch.device) -> CommStream:
    """Return one stream for all graphs; its kernels have priority, because the current stream's outlast them."""
    return comm_streams(device, 1)[0]
