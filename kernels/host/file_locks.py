"""One byte of a file locked per process: how a rank sees that another has died.

Linux frees an open file description's locks when its last descriptor goes, however the process ends.
Knows nothing of what the file holds.
"""

import fcntl
import struct

_FLOCK = "hhqqi"  # l_type, l_whence, l_start, l_len, l_pid of struct flock


def lock_byte(fd: int, byte: int) -> None:
    """Lock one byte for as long as `fd` stays open; raises OSError when somebody else has it."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, byte, 1, 0))


def is_locked(fd: int, byte: int) -> bool:
    """Whether somebody else, through another open of the file, has locked the byte."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, byte, 1, 0)
    answer = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)[: len(asked)])
    return answer[0] != fcntl.F_UNLCK
