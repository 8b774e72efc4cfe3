"""Locks on bytes of a file, one byte a process, and on whole files. A released lock shows the end of its process.

Linux releases the locks of an open file description when its last descriptor is closed, also if the process is killed.
Knows nothing of what the file holds.
"""

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = "hhqqi"  # l_type, l_whence, l_start, l_len, l_pid of struct flock


def lock_byte(fd: int, byte: int) -> None:
    """Lock one byte for as long as `fd` stays open; raise OSError if another open file description holds the lock."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, byte, 1, 0))


def is_locked(fd: int, byte: int) -> bool:
    """Return whether another open file description has locked the byte."""
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, byte, 1, 0)
    answer = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted)[: len(wanted)])
    lock_type: int = answer[0]
    return lock_type != fcntl.F_UNLCK


def lock_file(fd: int) -> bool:
    """Lock the file for as long as `fd` stays open; return whether no other open file description holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def file_holder(fd: int) -> str:
    """Name the process that has locked the whole file, for a message."""
    facts = os.fstat(fd)
    file = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        # number: kind, mode, access, process, file, first byte, last byte; a waiting lock has "->" before its kind
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5] == file and fields[4] != "0":
            return f"process {fields[4]} of this host"
    return "another process, perhaps of another host,"
