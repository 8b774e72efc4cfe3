"""The messages between a node that holds contents and a node that reads them: which are held, and leases on them.

A reader sends names and gets their units and check values; the contents stay in the memory of the holder under a lease,
as long as the reader sends beats. The bytes themselves go over NIXL. Sent over ZeroMQ, encrypted and authenticated, see
workers/wire/secure_socket.py. A source is an address with the key of its listener, as text: whoever has the text may
read, so it goes from rank to rank through encrypted streams alone. Imports no torch.
"""

import base64
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from workers.kv_transfer.keeper_client import KeeperClient
from workers.kv_transfer.nixl_memory import Registered
from workers.wire.secure_socket import Context, Socket, StreamAddress, connect, listen

logger = logging.getLogger(__name__)

BEAT_S = 1.0
MAX_LEASES = 64
"""Each lease has a connection to the keeper."""
NUM_THREADS = 8
"""Requests to the keeper at once; further ones wait."""
CLOSE_S = 2.0
"""Time to leave the keeper. A keeper that is stopped finds later that this process has ended."""


class Form(NamedTuple):
    """The form of contents, as KeeperClient.join takes it: contents of another form are useless."""

    compatibility: bytes
    unit_bytes: int


class Held(NamedTuple):
    """Contents under a lease: units in the memory of the holder, and the check value."""

    units: list[int]
    check: int


class RefusedError(Exception):
    """The source holds contents of another form, or takes no more readers."""


class SourceLostError(ConnectionError):
    """The source does not answer."""


def source_of(address: StreamAddress) -> str:
    """Return an address as text."""
    return f"{address.endpoint} {address.key.decode()}"


def address_of(source: str) -> StreamAddress:
    """Return what `source_of` got. Raises ValueError."""
    endpoint, separator, key = source.partition(" ")
    if not separator:
        raise ValueError(f"{endpoint} is no source of KV")
    return StreamAddress(endpoint, key.encode())


Reply = tuple[Any, ...]


@dataclass(eq=False)
class _Lease:
    """The lease of a reader, from its request on.

    opening   the connection to the keeper, which pins the contents, and the answer; None: the reader is refused
    until     the lease ends without a further beat
    """

    opening: "Future[tuple[KeeperClient | None, Reply]]"
    until: float
    answered: bool = False


class SourceServer:
    """Answers readers. All methods belong to one thread, and none of them waits for the keeper but `close`.

    attach      makes a connection to the keeper of this node, which pins the contents of one lease
    lease_s     time from a reader's last beat to the end of its lease
    registered  the memory of the node
    """

    def __init__(
        self,
        context: Context,
        host: str,
        registered: Registered,
        attach: Callable[[], KeeperClient],
        lease_s: float,
    ):
        self.socket, address = listen(context, host, zmq.ROUTER)
        self.source = source_of(address)
        self._registered, self._attach, self._lease_s = registered, attach, lease_s
        self._leases: dict[bytes, _Lease] = {}
        # The keeper may be stopped, and the caller has reads of other nodes to serve meanwhile.
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-source")
        self._leaving: set[Future[None]] = set()

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def answer(self) -> None:
        """Take all messages that are here, and answer the readers for which the keeper has answered.

        What cannot be read is logged. Raises KeeperLostError.
        """
        while self.socket.poll(0):
            reader, message = self.socket.recv_multipart()
            try:
                kind, *arguments = json.loads(message)
                if kind == "find":
                    self._find(reader, arguments)
                elif kind == "beat" and reader in self._leases:
                    self._leases[reader].until = self._until()
                elif kind == "end":
                    self._end(reader)
            except (ValueError, TypeError) as error:
                _cannot_read(error)
        for reader, lease in list(self._leases.items()):
            if not lease.answered and lease.opening.done():
                self._answer(reader, lease)

    def expire(self) -> None:
        """End the leases of readers that have sent no beat."""
        now = time.monotonic()
        for reader, lease in list(self._leases.items()):
            if now > lease.until:
                logger.warning("a reader of KV has sent nothing for %g s", self._lease_s)
                self._end(reader)

    def close(self) -> None:
        """End all leases, and wait CLOSE_S at most for the keeper."""
        for reader in list(self._leases):
            self._end(reader)
        self._threads.shutdown(wait=False)
        wait(self._leaving, CLOSE_S)
        self.socket.close()

    def _until(self) -> float:
        return time.monotonic() + self._lease_s

    def _find(self, reader: bytes, arguments: Sequence[Any]) -> None:
        self._end(reader)
        if len(self._leases) >= MAX_LEASES:
            self._send(reader, ("refused", f"{MAX_LEASES} readers are served already"))
            return
        self._leases[reader] = _Lease(self._threads.submit(self._open, *arguments), self._until())

    def _open(
        self, compatibility: str, unit_bytes: int, names: Sequence[str]
    ) -> tuple[KeeperClient | None, Reply]:
        """Pin contents, by a connection to the keeper of their own. Runs on a thread of its own."""
        form, wanted = bytes.fromhex(compatibility), [bytes.fromhex(name) for name in names]
        client = self._attach()
        if not client.join(form, unit_bytes):
            _leave(client)
            form_differs = "the store has contents of another model, precision or memory layout"
            return None, ("refused", form_differs)
        found = client.find(wanted)
        memory = self._registered
        held = [None if it is None else (it[0], it[1]) for it in found]
        metadata = base64.b64encode(memory.metadata).decode()
        return client, ("held", memory.name, metadata, memory.base, held)

    def _answer(self, reader: bytes, lease: _Lease) -> None:
        try:
            client, reply = lease.opening.result()
        except (ValueError, TypeError) as error:
            _cannot_read(error)
            del self._leases[reader]
            return
        lease.answered = True
        if client is None:
            del self._leases[reader]
        self._send(reader, reply)

    def _send(self, reader: bytes, reply: Reply) -> None:
        self.socket.send_multipart([reader, json.dumps(reply).encode()])

    def _end(self, reader: bytes) -> None:
        """End the lease of a reader, if it has one: the keeper unpins the contents of the connection."""
        lease = self._leases.pop(reader, None)
        if lease is not None:
            self._leaving = {it for it in self._leaving if not it.done()}
            self._leaving.add(self._threads.submit(_end_opened, lease.opening))


def _end_opened(opening: "Future[tuple[KeeperClient | None, Reply]]") -> None:
    """End what a lease has opened. A thread took `opening` before, so that the wait for it ends."""
    try:
        client, _ = opening.result()
    except Exception as error:
        logger.warning("a lease of a reader of KV was never open: %r", error)
        return
    if client is not None:
        _leave(client)


def _leave(client: KeeperClient) -> None:
    """End a connection in order, so that the keeper does not wait for its return."""
    client.leave()
    client.close()


def _cannot_read(error: Exception) -> None:
    logger.warning("a message of a reader of KV cannot be read: %r", error)


class SourceLink:
    """A reader's connection to a source, and its lease. All methods belong to one thread.

    Raises SourceLostError where the source is no address.
    """

    def __init__(self, context: Context, source: str):
        try:
            self._socket: Socket = connect(context, address_of(source), zmq.DEALER)
        except (ValueError, OSError) as error:
            raise SourceLostError(f"no connection to a source of KV: {error}") from None
        self._beat_at = 0.0

    def find(
        self, form: Form, names: Sequence[bytes], timeout_s: float
    ) -> tuple[Registered, list[Held | None]]:
        """Return the memory of the source, and what it holds of each name, from now on under a lease.

        Raises SourceLostError and RefusedError.
        """
        message = "find", form.compatibility.hex(), form.unit_bytes, [name.hex() for name in names]
        try:
            self._socket.send(json.dumps(message).encode(), zmq.NOBLOCK)
        except zmq.Again as error:
            raise SourceLostError("the source of KV refuses this node") from error
        if not self._socket.poll(max(0, round(1000 * timeout_s))):
            raise SourceLostError(f"the source of KV has not answered within {timeout_s:.1f} s")
        self._beat_at = time.monotonic() + BEAT_S
        try:
            kind, *reply = json.loads(self._socket.recv())
            if kind == "refused":
                raise RefusedError(reply[0])
            name, metadata, base, held = reply
            found = [None if it is None else Held(*it) for it in held]
            return Registered(name, base64.b64decode(metadata), base), found
        except (ValueError, TypeError) as error:
            raise SourceLostError(f"the answer of the source cannot be read: {error!r}") from error

    def beat(self) -> None:
        """Keep the lease, if a beat is due."""
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + BEAT_S
            self._send("beat")

    def close(self) -> None:
        """End the lease. A source that does not take the message ends it by itself."""
        self._send("end")
        self._socket.close(linger=1000)

    def _send(self, kind: str) -> None:
        """Send a message that may be lost: the lease then ends by itself."""
        with suppress(zmq.Again):
            self._socket.send(json.dumps([kind]).encode(), zmq.NOBLOCK)
