"""A rank's connection to the keeper of its node: finds or starts the keeper, maps the memory, sends requests.

All calls belong to one thread, and may wait. An error ends the connection. Imports no torch.
"""

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kernels.host.processes import start_ticks
from workers.kv_transfer.hints import Hints
from workers.kv_transfer.host_index import Place
from workers.kv_transfer.keeper import (
    KeeperConfig,
    RequestFailed,
    address_of,
    bound_waits,
    check_peer,
)

START_S = 20.0
RESTART_S = 1.0
"""Time after which a keeper is started again, because the one that was there has ended meanwhile."""
ATTEMPTS = 3
"""Connections that are tried: the socket of a process that was killed takes connections until the last moment."""
ANSWER_S = 60.0
"""Time for an answer, in which the keeper may read files."""
ROOT = str(Path(__file__).parents[2])
_PROGRAM = (
    "import sys; sys.path.insert(0, {root!r}); from workers.kv_transfer.keeper import main; main()"
)

Found = tuple[list[int], int, str]


class KeeperLostError(ConnectionError):
    """The keeper has ended, does not answer, or has failed in a request and dropped the connection."""


class KeeperStoppedError(KeeperLostError):
    """The keeper does not answer, though it has not ended."""


class KeeperClient:
    """A connection to the keeper of `config.name`, which is started where there is none.

    hints   the names that the store holds, perhaps
    memory  of the rows, shared with the keeper and the other ranks
    keeper  number of the keeper's process, and the time of its start
    """

    def __init__(self, config: KeeperConfig):
        where, whole = self._attach(config)
        hint_bytes = where["hint_bytes"]
        self.keeper: tuple[int, int] = where["pid"], where["started"]
        self.hints, self.memory = Hints(whole[:hint_bytes]), whole[hint_bytes:]

    def _attach(self, config: KeeperConfig) -> tuple[dict[str, Any], memoryview]:
        """Connect; return where the memory is, and the memory. A keeper that ends meanwhile has a successor."""
        for left in reversed(range(ATTEMPTS)):
            self._connection = _connect(config)
            try:
                where: dict[str, Any] = self._ask("attach")
                return where, _map(where)
            except OSError as error:
                self._connection.close()
                if not left or isinstance(error, KeeperStoppedError):
                    raise
            except BaseException:
                self._connection.close()
                raise
        raise AssertionError("the last attempt returns or raises")

    def layout(self, compatibility: bytes, unit_bytes: int, window_blocks: int) -> int:
        """Agree on the form of contents; return the number of units in the memory."""
        return int(self._ask("layout", compatibility, unit_bytes, window_blocks))

    def join(self, compatibility: bytes, unit_bytes: int) -> bool:
        """Agree on the form of contents if the store has it; return whether it has."""
        return bool(self._ask("join", compatibility, unit_bytes))

    def fileno(self) -> int:
        """Return the descriptor of the connection, which becomes readable when the keeper has ended."""
        return self._connection.fileno()

    def reserve(self, places: list[Place]) -> list[list[int] | None]:
        """Return units to fill for each of `places`; None: the contents are there, or have no room."""
        return self._ask("reserve", places)  # type: ignore[no-any-return]

    def publish(self, checks: dict[bytes, int | None]) -> None:
        """Enter check values of names that were reserved and filled; None: the contents could not be filled."""
        self._ask("publish", checks)

    def find(self, names: list[bytes]) -> list[Found | None]:
        """Return (units, check value, origin) of each name, which stay until `release`; None: it is not there."""
        return self._ask("find", names)  # type: ignore[no-any-return]

    def release(self, damaged: list[bytes]) -> None:
        """End the use of what was found, of which these are damaged."""
        self._ask("release", damaged)

    def forget(self, names: list[bytes]) -> None:
        """Let no rank find these names."""
        self._ask("forget", names)

    def counts(self) -> dict[str, float]:
        """Return the counters and gauges of the store."""
        return self._ask("counts")  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Leave in order: the keeper ends with the last rank that does."""
        with suppress(KeeperLostError):
            self._ask("leave")

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _ask(self, kind: str, *arguments: object) -> Any:
        try:
            self._connection.send((kind, *arguments))
            if not self._connection.poll(ANSWER_S):
                raise KeeperStoppedError(f"no answer to {kind} within {ANSWER_S:g} s")
            answer = self._connection.recv()
            if isinstance(answer, RequestFailed):
                raise KeeperLostError(f"the keeper failed in {kind}: {answer.reason}")
            return answer
        except (EOFError, OSError) as error:
            self._connection.close()
            if isinstance(error, KeeperLostError):
                raise
            if isinstance(error, BlockingIOError):
                stopped = f"a part of {kind} has not passed within {ANSWER_S:g} s"
                raise KeeperStoppedError(stopped) from error
            raise KeeperLostError(f"the keeper of this node's KV has ended: {error!r}") from error


def _map(where: dict[str, Any]) -> memoryview:
    """Return the memory of the keeper that has answered."""
    fd = os.open(f"/proc/{where['pid']}/fd/{where['fd']}", os.O_RDWR)
    try:
        if start_ticks(where["pid"]) != where["started"]:
            raise KeeperLostError(f"process {where['pid']} has ended")
        return memoryview(mmap.mmap(fd, where["hint_bytes"] + where["num_bytes"]))
    finally:
        os.close(fd)


def _connect(config: KeeperConfig) -> Connection:
    start_at = time.monotonic()
    deadline = start_at + START_S
    while True:
        peer = socket.socket(socket.AF_UNIX)
        bound_waits(peer, ANSWER_S)
        try:
            peer.connect(address_of(config.name))
            check_peer(peer)
            return Connection(peer.detach())
        except ConnectionRefusedError as error:
            peer.close()
            now = time.monotonic()
            if now > deadline:
                raise KeeperLostError("no keeper has started") from error
            if now >= start_at:
                _start(config)
                start_at = time.monotonic() + RESTART_S
            else:
                time.sleep(0.01)
        except BaseException:
            peer.close()
            raise


def _start(config: KeeperConfig) -> None:
    """Start a keeper in a session of its own, which outlives this process. It writes to this process's stderr."""
    program = [sys.executable, "-I", "-S", "-c", _PROGRAM.format(root=ROOT)]
    subprocess.run(
        program,
        input=json.dumps(asdict(config)).encode(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        timeout=START_S,
        check=True,
    )
