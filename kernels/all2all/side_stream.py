"""Work on the stream that exchanges have to themselves in microbatched steps, or on the current one.

Tensors made on the side stream need no `record_stream`: whoever reuses their memory works on that stream too, and
every entry waits for what the compute stream had been given by then, which is all that read them. So the inputs
must stay alive until somebody waited for the results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def behind_current(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Enqueue what follows on `stream`, behind all that the current stream was given; None: on the current one."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


class Mark:
    """Everything on `stream` so far, with the inputs it reads; on the current stream (None) nothing has to wait."""

    def __init__(self, stream: torch.cuda.Stream | None, *inputs: Any):
        self._event = None if stream is None else stream.record_event()
        self._inputs = inputs

    def wait(self) -> None:
        """Make the current stream wait; the host goes on at once, and the inputs may go."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._inputs = ()
