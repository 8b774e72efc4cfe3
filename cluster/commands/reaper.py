"""Ends the processes of a local Ray after the process that started it has ended, also after its SIGKILL.

Ray's own processes notice the end of the launcher, but Ray's agents take more than 10 s, and a stopped or stuck rank
notices nothing. The reaper is a process of its own, in a session of its own, and this module is its program, with the
standard library alone.

It finds a process by the logs of Ray's session that the process has open for writing, because Ray's processes overwrite
their command lines and environments. The folder of a session ends with the launcher's process id.
"""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.5
GRACE_S = 1.0  # for the processes to end by themselves
GIVE_UP_S = 60.0  # a process in an uninterruptible system call cannot be killed

PROC = Path("/proc")
_reapers: dict[
    int, subprocess.Popen[bytes]
] = {}  # by the launcher: a forked process needs one of its own


def start() -> None:
    """Start a reaper that waits for the end of this process. A second call has no effect."""
    launcher = os.getpid()
    if launcher in _reapers or not PROC.exists():
        return
    _reapers[launcher] = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(launcher)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_session() -> None:
    """End the processes of this process's Ray at once."""
    for pid in session_processes(os.getpid()):
        if pid != os.getpid():
            _kill(pid)


def wait_and_reap(launcher: int) -> None:
    """Wait for the end of the parent process `launcher`, then end the processes of its Ray."""
    while os.getppid() == launcher:
        time.sleep(POLL_S)
    ended = time.monotonic()
    while (found := session_processes(launcher)) and time.monotonic() < ended + GIVE_UP_S:
        if time.monotonic() > ended + GRACE_S:
            for pid in found:
                _kill(pid)
        time.sleep(POLL_S / 5)


def session_processes(launcher: int) -> list[int]:
    """Return the processes that can write to a log of the Ray session of `launcher`."""
    log = re.compile(rf"/session_[^/]*_{launcher}/logs/")
    return [
        int(folder.name)
        for folder in PROC.iterdir()
        if folder.name.isdigit() and _writes(folder / "fd", log)
    ]


def _writes(descriptors: Path, file: re.Pattern[str]) -> bool:
    """Return whether a descriptor is open for writing to `file`; a reader of a log is no process of Ray."""
    try:
        links = list(descriptors.iterdir())
    except OSError:  # the process has ended, or belongs to another user
        return False
    for link in links:
        with suppress(OSError):  # the descriptor is closed
            if file.search(os.readlink(link)) and link.lstat().st_mode & stat.S_IWUSR:
                return True
    return False


def _kill(pid: int) -> None:
    with suppress(OSError):  # it has ended
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    wait_and_reap(int(sys.argv[1]))
