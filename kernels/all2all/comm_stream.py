"""Work on the stream that the exchanges of a slice have to themselves, or on the current one.

Tensors made on a side stream need no `record_stream`: whoever reuses their memory works on that stream too, and
every entry waits for what the slice's compute had been given by then, which is all that read them. So the inputs
must stay alive until somebody waited for the results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CommStream(torch.cuda.Stream):
    """A stream for exchanges, before the compute where both are ready.

    others   side streams whose exchanges must not run beside this one's: ranks then agree on the order of all
    """

    others: tuple["CommStream", ...] = ()


def comm_streams(device: torch.device, count: int) -> list[CommStream]:
    """Streams that take turns, in the order in which they are given work."""
    streams = [CommStream(device, -1) for _ in range(count)]
    for stream in streams:
        stream.others = tuple(other for other in streams if other is not stream)
    return streams


@contextmanager
def on_comm_stream(stream: CommStream | None) -> Iterator[None]:
    """Enqueue what follows on `stream`, behind all that the current stream was given; None: on the current one."""
    if stream is None:
        yield
        return
    for earlier in (torch.cuda.current_stream(), *stream.others):
        stream.wait_stream(earlier)
    with torch.cuda.stream(stream):
        yield


class StreamEvent:
    """Everything on `stream` so far, with the inputs it reads; on the current stream (None) nothing has to wait."""

    def __init__(self, stream: CommStream | None, *inputs: Any):
        self._event = None if stream is None else stream.record_event()
        self._inputs = inputs

    def wait(self) -> None:
        """Make the current stream wait; the host goes on at once, and the inputs may go."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._inputs = ()
