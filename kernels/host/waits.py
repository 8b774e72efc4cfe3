"""The time for which threads of a rank wait for other ranks or for their device, and so do no work of their own.

The rank of a group that waits least is the slow one, because all ranks begin and end each step together.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _OfThread(threading.local):
    waited_s = 0.0


_of_thread = _OfThread()


def add_wait(seconds: float) -> None:
    """Count a wait of this thread."""
    _of_thread.waited_s += seconds


@contextmanager
def waiting() -> Iterator[None]:
    """Count the time of the block as a wait of this thread."""
    started = time.monotonic()
    yield
    add_wait(time.monotonic() - started)


def waited_s() -> float:
    """Return the seconds for which this thread has waited so far."""
    return _of_thread.waited_s
