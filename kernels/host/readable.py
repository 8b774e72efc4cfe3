"""Waits until a socket has bytes to read: first while it yields the core, then asleep.

The interrupt that wakes a sleeping core takes tens of microseconds in a virtual machine. On a busy machine a process
that yields gets the core back late, so the time is short.
"""

import os
import select
import socket
import time

from kernels.host.waits import waiting

YIELD_S = 2e-4  # seconds of yielding the core, 2 us each time on a free core; then the rank sleeps


class Readable:
    """Whether one socket can be read. Belongs to one thread."""

    def __init__(self, source: socket.socket):
        self._poll = select.poll()
        self._poll.register(source, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Return whether bytes, or the end of the stream, arrived within about `timeout_s` seconds."""
        poll = self._poll.poll
        if poll(0):
            return True
        with waiting():
            yield_until = time.monotonic() + YIELD_S
            while time.monotonic() < yield_until:
                os.sched_yield()
                if poll(0):
                    return True
            return bool(poll(1000 * timeout_s))
