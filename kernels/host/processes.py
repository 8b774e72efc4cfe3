"""A process of this machine by its number and its start: a number alone may belong to a later process."""

import os
import signal
from contextlib import suppress
from pathlib import Path

# Positions in /proc/PID/stat after the name, which may contain spaces and brackets.
_STATE, _START = 0, 19


def start_ticks(pid: int) -> int:
    """Return the clock ticks from the boot to the start of a process. Raises OSError if it has ended."""
    return int(_facts(pid)[_START])


def runs(pid: int, started: int) -> bool:
    """Return whether the process that `start_ticks` returned `started` of runs. A zombie has ended."""
    try:
        facts = _facts(pid)
    except OSError:
        return False
    return int(facts[_START]) == started and facts[_STATE] not in (b"Z", b"X")


def _facts(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


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
