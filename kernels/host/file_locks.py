"""Locks on bytes of a file, one byte a process. A rank detects the death of a peer by its released lock.

Linux releases the locks of an open file description when its last descriptor is closed, also if the process is killed.
Knows nothing of what the file holds.
"""

import fcntl
import struct

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
