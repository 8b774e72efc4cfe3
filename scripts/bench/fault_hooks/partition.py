"""Cuts a process off from another one of this machine, as a firewall does that drops all packets between both.

While the file PID.partition is in a folder, process PID drops what comes by its connections with the process whose
number the file contains, and new connections to its own ports of streams. Sockets drop packets by a filter, which needs
no privileges; acknowledgements are dropped too, so that neither side gets an end of a connection.
"""

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from pathlib import Path

import psutil

LOOK_S = 0.05
ATTACH_FILTER, DETACH_FILTER = 26, 27  # of <asm-generic/socket.h>
RETURN = 0x06  # BPF_RET | BPF_K: keep this number of bytes of each packet
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))


def watch(folder: Path, ports: set[int]) -> None:
    """Start a thread that cuts this process off while the file is there. `ports`: of streams."""
    path = folder / f"{os.getpid()}.partition"

    def run() -> None:
        while True:
            with contextlib.suppress(OSError):  # there is no file, or no descriptor is free
                _cut_off(psutil.Process(int(path.read_text())), path, ports)
            time.sleep(LOOK_S)

    threading.Thread(target=run, name="partition", daemon=True).start()


def _cut_off(peer: psutil.Process, path: Path, ports: set[int]) -> None:
    """Drop packets until the file is gone or the peer has ended."""
    cut: set[int] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        while path.exists():
            theirs = {(link.raddr, link.laddr) for link in peer.net_connections("tcp")}
            for link in psutil.Process().net_connections("tcp"):
                listens = not link.raddr and link.laddr.port in ports
                if link.fd not in cut and (listens or (link.laddr, link.raddr) in theirs):
                    _set(link.fd, ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL)))
                    cut.add(link.fd)
            time.sleep(LOOK_S)
    for fd in cut:
        _set(fd, DETACH_FILTER, struct.pack("i", 0))


def _set(fd: int, option: int, value: bytes) -> None:
    """Set an option of a socket that may have been closed meanwhile."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
        copy.setsockopt(socket.SOL_SOCKET, option, value)
