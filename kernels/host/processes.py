"""A process of this machine by its number and its start: a number alone may belong to a later process."""

import os
import signal
from contextlib import suppress
from pathlib import Path

_START = 19  # position in /proc/PID/stat after the name, which may contain spaces and brackets


def start_ticks(pid: int) -> int:
    """Return the clock ticks from the boot to the start of a process. Raises OSError if it has ended."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[_START])


def kill(pid: int, started: int) -> None:
    """Send SIGKILL to the process that `start_ticks` returned `started` of; does nothing if it has ended."""
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            # The descriptor is that of one process, so no other one gets the signal if this process ends meanwhile.
            if start_ticks(pid) == started:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
