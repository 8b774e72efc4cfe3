"""The keeper of a node: a process that owns the memory that the ranks of the node share, and the index of its contents.

The memory is a memfd, without a name, so nothing is left of it when its last process has ended, however it ended. The
keeper outlives ranks: a rank that replaces a dead one finds the contents again. It ends when the process that started
the ranks has ended, when all ranks have left in order, or KEEP_S after the last one was lost.

Ranks connect to an abstract socket and send one request at a time; they write and read the memory themselves. What a
lost rank has reserved or pinned is free again. Needs the standard library alone, and little memory.
"""

import hashlib
import json
import logging
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from kernels.host.processes import runs, start_ticks
from workers.kv_transfer.disk_tier import DiskTier
from workers.kv_transfer.hints import Hints, hint_bytes
from workers.kv_transfer.host_index import Entry, HostIndex, Place

logger = logging.getLogger(__name__)

KEEP_S = 120.0
"""Time for a rank to start in the place of the last one of a node."""
POLL_S = 0.5
ACCEPT_RETRY_S = 0.1
RANK_S = 5.0
"""Time for the rest of a message from or to a rank: all others wait, so one that stops in the middle is dropped."""


def address_of(name: str) -> bytes:
    """Return the abstract address of the keeper of a server's ranks on this node."""
    return b"\0phalanx-kv-" + name.encode()


def check_peer(peer: socket.socket) -> None:
    """Raise PermissionError unless the process at the other end belongs to this user."""
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.geteuid():
        raise PermissionError(f"process {pid} at the keeper's socket belongs to user {user}")


def bound_waits(peer: socket.socket, seconds: float) -> None:
    """Let reads and writes of this end fail after a time, because the other process may be stopped."""
    limit = struct.pack("ll", *divmod(round(1e6 * seconds), 10**6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, limit)


@dataclass(frozen=True)
class KeeperConfig:
    """What the first rank of a node starts its keeper with.

    name          of the server's ranks on this node
    num_bytes     of the shared memory
    row_bytes     of the smallest rows, by which the filter of names has its size
    owner         process that starts ranks, with the time of its start: the keeper ends with it
    disk_path     folder of the file tier; None: there is none
    disk_bytes    of its files at most
    disk_salt     on which files depend beside the form of contents, because they outlive the server
    """

    name: str
    num_bytes: int
    owner: tuple[int, int]
    row_bytes: int = 512
    disk_path: str | None = None
    disk_bytes: int = 0
    disk_salt: str = ""


class RequestFailed(NamedTuple):
    """The answer to a request that raised an error in the keeper."""

    reason: str


@dataclass(eq=False)
class _Client:
    """A connected rank, with the contents that it writes and reads. layout: of its contents, once it is known."""

    connection: Connection
    layout: tuple[Any, ...] = ()
    writing: dict[bytes, Entry] = field(default_factory=dict)
    reading: list[Entry] = field(default_factory=list)
    left: bool = False


class Keeper:
    """The store of one node. All methods belong to one thread."""

    def __init__(self, config: KeeperConfig):
        self._config = config
        size = hint_bytes((config.num_bytes + config.disk_bytes) // config.row_bytes)
        self.fd = os.memfd_create("phalanx-kv")
        os.ftruncate(self.fd, size + config.num_bytes)
        self._rows_at, self._hint_bytes = size, size
        self._memory = _map(self.fd, size + config.num_bytes)
        self._hints = Hints(self._memory[:size])
        self._layout: tuple[Any, ...] = ()
        self._unit_bytes = 0
        self._index = HostIndex(0)
        self._disk: DiskTier | None = None
        # Names, from before there is a form of contents, and so before the files are known.
        self._forgotten: list[bytes] = []
        self._clients: list[_Client] = []
        self._counts: dict[str, float] = {"damaged": 0, "errors": 0}

    def add(self, connection: Connection) -> None:
        """Serve one more rank."""
        self._clients.append(_Client(connection))

    @property
    def connections(self) -> list[Connection]:
        """Of the ranks."""
        return [client.connection for client in self._clients]

    def answer(self, connection: Connection) -> bool:
        """Answer one request of a rank; return whether the rank has left in order."""
        client = next((it for it in self._clients if it.connection is connection), None)
        if client is None:
            # A request of another rank that came together with this one has dropped it.
            return False
        try:
            kind, *arguments = connection.recv()
            handler: Callable[..., Any] = getattr(self, f"_on_{kind}")
            connection.send(handler(client, *arguments))
        except (EOFError, OSError):
            self._drop(client)
            return client.left
        except Exception as error:
            self._fail(client, error)
        self._follow_evictions()
        return False

    def _fail(self, client: _Client, error: Exception) -> None:
        """Answer a request that raised an error, and go on with the other ranks. The rank may connect again."""
        logger.error("a request of a rank has failed", exc_info=error)
        self._counts["errors"] += 1
        with suppress(OSError):
            client.connection.send(RequestFailed(repr(error)))
        self._drop(client)

    def close(self) -> None:
        """Finish the files."""
        if self._disk is not None:
            self._disk.close()

    def _follow_evictions(self) -> None:
        """Let the filter have each name once for the memory and once for its file."""
        for name in self._index.evicted:
            self._hints.remove(name)
        self._index.evicted.clear()
        if self._disk is not None:
            while self._disk.changes:
                name, has_file = self._disk.changes.popleft()
                (self._hints.add if has_file else self._hints.remove)(name)

    def _drop(self, client: _Client) -> None:
        client.connection.close()
        self._clients.remove(client)
        for entry in client.writing.values():
            self._index.discard(entry)
        for entry in client.reading:
            self._index.unpin(entry)
        client.writing, client.reading = {}, []

    def _on_attach(self, client: _Client) -> dict[str, Any]:
        """Return where the memory is."""
        pid = os.getpid()
        return {
            "pid": pid,
            "started": start_ticks(pid),
            "fd": self.fd,
            "hint_bytes": self._hint_bytes,
            "num_bytes": self._config.num_bytes,
        }

    def _on_layout(
        self, client: _Client, compatibility: bytes, unit_bytes: int, window_blocks: int
    ) -> int:
        """Take the form of contents; another one than before empties the store. Returns the number of units."""
        client.layout = layout = compatibility, unit_bytes, window_blocks
        if layout != self._layout:
            for other in [it for it in self._clients if it.layout not in ((), layout)]:
                self._drop(other)  # it has the old form, and will connect again
            self._layout, self._unit_bytes = layout, unit_bytes
            num_units = self._config.num_bytes // unit_bytes
            self._index = HostIndex(num_units, window_blocks=window_blocks)
            client.writing, client.reading = {}, []
            self._hints.clear()
            self._open_disk(compatibility)
        return self._index.num_units

    def _on_join(self, client: _Client, compatibility: bytes, unit_bytes: int) -> bool:
        """Take the form of contents if the store has it, and return whether it has."""
        joins = self._layout[:2] == (compatibility, unit_bytes)
        if joins:
            client.layout = self._layout
        return joins

    def _open_disk(self, compatibility: bytes) -> None:
        config = self._config
        if self._disk is not None:
            self._disk.close()
            self._disk = None
        if config.disk_path is not None:
            salted = hashlib.blake2b(compatibility + config.disk_salt.encode(), digest_size=16)
            self._disk = DiskTier(config.disk_path, config.disk_bytes, salted.digest())
            for name in self._forgotten:
                self._disk.forget(name)
            self._forgotten.clear()
            self._follow_evictions()  # before the answer, behind which a rank looks for names

    def _on_reserve(self, client: _Client, places: list[Place]) -> list[list[int] | None]:
        """Return the units of each of `places` to fill; None where contents are there, or have no room."""
        found: list[list[int] | None] = []
        for place in places:
            entry = self._index.reserve(place)
            if entry is not None:
                client.writing[entry.name] = entry
            found.append(None if entry is None else entry.units)
        return found

    def _on_publish(self, client: _Client, checks: dict[bytes, int | None]) -> None:
        """Enter what a rank has filled, with the check value of each; None: it could not fill it."""
        for name, check in checks.items():
            entry = client.writing.pop(name, None)
            if entry is None:
                continue
            if check is None:
                self._index.discard(entry)
                continue
            if not self._index.publish(entry, check):
                continue
            self._hints.add(name)
            if self._disk is not None and not entry.private:
                self._disk.offer(entry.place, check, self._units(entry))

    def _units(self, entry: Entry) -> list[memoryview]:
        size, start = self._unit_bytes, self._rows_at
        return [self._memory[start + unit * size :][:size] for unit in entry.units]

    def _on_find(
        self, client: _Client, names: list[bytes]
    ) -> list[tuple[list[int], int, str] | None]:
        """Return units, check value and origin of each name, pinned until `release`; None: it is not there."""
        found: list[tuple[list[int], int, str] | None] = []
        for name in names:
            entry = self._index.get(name) or self._from_disk(name)
            if entry is None:
                found.append(None)
                continue
            self._index.pin(entry)
            client.reading.append(entry)
            assert entry.check is not None
            found.append((entry.units, entry.check, entry.origin))
            entry.origin = "host"  # of the next reader
        return found

    def _from_disk(self, name: bytes) -> Entry | None:
        """Bring contents of a file to the memory."""
        if self._disk is None or (place := self._disk.place_of(name)) is None:
            return None
        entry = self._index.reserve(place)
        if entry is None:
            return None
        check = self._disk.read(name, self._units(entry))
        if check is None:
            self._index.discard(entry)
            return None
        entry.origin = "disk"
        self._index.publish(entry, check)
        self._hints.add(name)
        return entry

    def _on_release(self, client: _Client, damaged: list[bytes]) -> None:
        """End the use of all that the rank has found. Damaged contents are not found any more."""
        for entry in client.reading:
            self._index.unpin(entry)
        client.reading.clear()
        self._counts["damaged"] += len(damaged)
        self._on_forget(client, damaged)

    def _on_forget(self, client: _Client, names: list[bytes]) -> None:
        if not self._layout:
            self._forgotten += names
        for name in names:
            if self._index.get(name) is not None:
                self._hints.remove(name)
            if self._disk is not None:
                self._disk.forget(name)
        self._index.forget(names)

    def _on_counts(self, client: _Client) -> dict[str, float]:
        """Return counters and gauges of the store by name."""
        index = self._index
        found = {
            **self._counts,
            "bytes": index.num_units * self._unit_bytes,
            "used_bytes": (index.num_units - index.num_free) * self._unit_bytes,
            "evicted": index.num_evicted,
        }
        return found if self._disk is None else {**found, **self._disk.counts()}

    def _on_leave(self, client: _Client) -> None:
        client.left = True


def _map(fd: int, size: int) -> memoryview:
    mapped = mmap.mmap(fd, size)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)


def serve(config: KeeperConfig, listener: socket.socket) -> None:
    """Keep the store until its end."""
    keeper, lost_at = Keeper(config), time.monotonic()
    try:
        while runs(*config.owner):
            ready = wait([*keeper.connections, listener], POLL_S)
            for it in ready:
                if it is listener:
                    if (connection := _accepted(listener)) is not None:
                        keeper.add(connection)
                elif isinstance(it, Connection):
                    in_order = keeper.answer(it)
                    if in_order and not keeper.connections:
                        return
            if keeper.connections:
                lost_at = time.monotonic()
            elif time.monotonic() > lost_at + KEEP_S:
                return
    finally:
        keeper.close()


def _accepted(listener: socket.socket) -> Connection | None:
    try:
        peer, _ = listener.accept()
    except OSError as error:
        # Without a descriptor the rank waits in the queue of the socket.
        logger.warning("a rank cannot connect for now: %s", error)
        time.sleep(ACCEPT_RETRY_S)
        return None
    try:
        check_peer(peer)
    except PermissionError as error:
        logger.warning("%s", error)
        peer.close()
        return None
    bound_waits(peer, RANK_S)
    return Connection(peer.detach())


def main() -> None:
    """Read the configuration from stdin, and serve in a process that is no child of the rank that starts it.

    Another keeper of this name may be there already: then nothing starts.
    """
    fields = json.load(sys.stdin)
    config = KeeperConfig(**{**fields, "owner": tuple(fields["owner"])})
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address_of(config.name))
    except OSError:
        return
    listener.listen(128)
    if os.fork():
        os._exit(0)
    logging.basicConfig(format="%(asctime)s keeper of KV: %(message)s", level=logging.INFO)
    serve(config, listener)
