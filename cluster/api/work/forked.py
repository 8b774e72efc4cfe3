"""The side of `processes` in the template and in its children: loads, forks, works, answers.

The template has one thread and starts no other, so that its children may use all that it has loaded.
"""

import fcntl
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

from cluster.api.work.frames import NUMBER_BYTES, from_frames, to_frames

_NICENESS = 5  # streams of the parent come first


def run(control_fd: int) -> None:
    """Load what work needs, then fork a child for each socket that arrives, until the parent closes its end."""
    context = pickle.load(sys.stdin.buffer)()
    gc.freeze()  # a collection in a child would copy the pages of all that is loaded
    os.nice(_NICENESS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for a child
    with socket.socket(fileno=control_fd) as control:
        while True:
            data, sockets, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            with socket.socket(fileno=sockets[0]) as connection:
                _begin(context, control, connection)


def _begin(context: object, control: socket.socket, connection: socket.socket) -> None:
    """Begin a piece of work in a child. Without room for one the work ends, not the template with all it has loaded."""
    try:
        child = os.fork()
    except OSError:
        traceback.print_exc()
        return
    if child == 0:
        control.close()
        _answer(context, connection)


def _answer(context: object, connection: socket.socket) -> None:
    """Do one piece of work in a child, and end it."""
    try:
        cpu_s, work, args = from_frames(_receive(connection))
        _limit(connection, cpu_s)
        _end_with_peer(connection, True)
        try:
            outcome: tuple[bool, Any] = (True, work(context, *args))
        except ValueError as error:  # of a user
            outcome = (False, error)
        except Exception as error:
            traceback.print_exc()
            outcome = (False, RuntimeError(f"{type(error).__name__}: {error}"))
        answer = to_frames(outcome)
        _end_with_peer(connection, False)
        _lift_limit(connection)
        for part in answer:
            connection.sendall(part)
        code = 0
    except BaseException:  # the parent has closed the socket, or sees an answer without end
        code = 1
    os._exit(code)


def _limit(connection: socket.socket, cpu_s: float) -> None:
    """Report the end of the processor time to the parent, which closes its end, and this ends the process.

    The interpreter's signal handler itself sends the number of the signal, in any code. The signal alone would end the
    process too, but the parent would take it for a process that was killed.
    """
    connection.setblocking(False)  # a signal handler may not wait
    signal.set_wakeup_fd(connection.fileno())
    signal.signal(signal.SIGPROF, lambda *_: os._exit(1))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _lift_limit(connection: socket.socket) -> None:
    """Leave the socket to the answer. If the time is over just now, the handler ends the process here."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.set_wakeup_fd(-1)
    connection.setblocking(True)


def _receive(connection: socket.socket) -> list[bytes]:
    """Return the frames of the job. Raises EOFError if the parent has left."""
    with connection.makefile("rb") as stream:

        def read(num_bytes: int) -> bytes:
            data = stream.read(num_bytes)
            if len(data) < num_bytes:
                raise EOFError
            return data

        num_frames = int.from_bytes(read(NUMBER_BYTES))
        lengths = [int.from_bytes(read(NUMBER_BYTES)) for _ in range(num_frames)]
        return [read(length) for length in lengths]


def _end_with_peer(connection: socket.socket, on: bool) -> None:
    """Whether the kernel ends this process, by SIGIO, when the parent closes its end. Off while the answer is sent."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    flags = flags | os.O_ASYNC if on else flags & ~os.O_ASYNC
    fcntl.fcntl(connection, fcntl.F_SETFL, flags)
    if on:
        with suppress(BlockingIOError):
            if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise EOFError  # it was closed before
