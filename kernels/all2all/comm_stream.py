"""Work on the stream of a ubatch's all-to-all, or on the current one.

Tensors made on a comm stream need no `record_stream`: their memory is only reused by work on the same stream, and each
entry waits for the ubatch's compute so far, which contains every reader. The inputs of an all-to-all must therefore
stay alive until its result was waited for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CommStream(torch.cuda.Stream):
    """A stream for all-to-alls; their kernels have priority over those of the compute.

    others   comm streams with all-to-alls that must not run beside those of this stream, so that their order is equal
             on all ranks
    """

    others: tuple["CommStream", ...] = ()


def comm_streams(device: torch.device, count: int) -> list[CommStream]:
    """Return streams that run one at a time, in the order of their work."""
    streams: list[CommStream] = [CommStream(device, -1) for _ in range(count)]  # type: ignore[no-untyped-call]
    for stream in streams:
        stream.others = tuple(x for x in streams if x is not stream)
    return streams


@contextmanager
def on_comm_stream(stream: CommStream | None) -> Iterator[None]:
    """Enqueue the work of the block on `stream`, behind the current stream's work; None: on the current stream."""
    if stream is None:
        yield
        return
    for earlier in (torch.cuda.current_stream(), *stream.others):
        stream.wait_stream(earlier)
    with torch.cuda.stream(stream):
        yield


class StreamEvent:
    """The end of the work on `stream` so far; keeps alive the inputs of that work. None: the current stream."""

    def __init__(self, stream: CommStream | None, *inputs: Any):
        self._event = None if stream is None else stream.record_event()
        self._inputs = inputs

    def wait(self) -> None:
        """Make the current stream wait for the work, without waiting on the host, and release the inputs."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._inputs = ()
