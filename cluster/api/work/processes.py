"""Runs work in processes of its own, which can be ended: work holds neither the interpreter lock nor a thread here.

One process, the template, loads what work needs and forks a child for each piece of work. A piece of work has a socket
of its own to its child; the end of this socket ends the child. Knows nothing of the work.
"""

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from cluster.api.work.frames import NUMBER_BYTES, from_frames, to_frames

_PART_BYTES = 256 * 1024
_JOINED_HERE = 4 * 1024 * 1024
_Result = TypeVar("_Result")


class WorkLimitError(RuntimeError):
    """Work took more processor time than it may."""


class WorkEndedError(RuntimeError):
    """The process of a piece of work ended without a result; its last words are on standard error."""


class WorkProcesses:
    """The template process, which starts at the first work, and its children.

    setup   called once in the template; work gets its result as the first argument
    """

    def __init__(self, setup: Callable[[], object]) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the template before the first work, which waits for all that it loads."""
        with self._lock:
            if self._control is None:
                self._start()

    async def run(self, work: Callable[..., _Result], *args: Any, cpu_s: float) -> _Result:
        """Return work(result of the setup, *args); all of it travels by pickle. Cancelled, it ends the child at once.

        Raises what `work` raises, WorkLimitError after `cpu_s` seconds of processor time, and WorkEndedError.
        """
        job = to_frames((cpu_s, work, args))
        connection = await asyncio.to_thread(self._connect)
        try:
            answer = await _exchange(connection, job)
        except WorkLimitError:
            raise WorkLimitError(f"the work took more than {cpu_s:g} s of processor time") from None
        finally:
            connection.close()
        if answer is None:
            raise WorkEndedError(
                "the process of this work has ended; the server's log may have the reason"
            )
        good, value = from_frames(answer)
        if not good:
            raise value
        result: _Result = value
        return result

    def close(self) -> None:
        """End the template; children end with their work."""
        with self._lock:
            self._end()
            self._control = None

    def _connect(self) -> socket.socket:
        """Return a socket to a new child; the template starts if it does not run."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with self._lock, theirs:
            for _ in range(2):
                if self._control is None:
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"w"], [theirs.fileno()])
                    return ours
                except OSError:  # the template has ended
                    self._end()
                    self._control = None
        ours.close()
        raise WorkEndedError("the template of work processes does not start")

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            # With this process's sys.path: -m would import from the user's folder first.
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from cluster.api.work.forked import run; run({theirs.fileno()})"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(pickle.dumps(self._setup))
        self._end = weakref.finalize(self, _end_template, self._control, process)


def _end_template(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """End the template, which waits for work or loads."""
    control.close()
    process.kill()
    process.wait()


async def _exchange(connection: socket.socket, job: list[bytes]) -> list[bytes] | None:
    """Send the job; return the frames of the answer, or None if the child has ended without a complete one.

    Raises WorkLimitError if the child reports its signal, where an answer begins with a zero.
    """
    loop = asyncio.get_running_loop()
    try:
        for part in job:
            await loop.sock_sendall(connection, part)
        first = await _receive(connection, 1)
        if first != b"\0":
            raise WorkLimitError
        num_frames = int.from_bytes(await _receive(connection, NUMBER_BYTES - 1))
        numbers = await _receive(connection, num_frames * NUMBER_BYTES)
        lengths = (numbers[at : at + NUMBER_BYTES] for at in range(0, len(numbers), NUMBER_BYTES))
        return [await _receive(connection, int.from_bytes(length)) for length in lengths]
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return None


async def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive a number of bytes. Raises EOFError at the end of the stream."""
    loop = asyncio.get_running_loop()
    parts: list[bytes] = []
    missing = num_bytes
    while missing:
        part = await loop.sock_recv(connection, min(missing, _PART_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    if num_bytes > _JOINED_HERE:
        return await asyncio.to_thread(b"".join, parts)  # which holds no interpreter lock
    return b"".join(parts)
