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
from contextlib import suppress
from typing import Any, NamedTuple

import zmq

from workers.kv_transfer.keeper_client import KeeperClient
from workers.kv_transfer.nixl_memory import Registered
from workers.wire.secure_socket import Context, Socket, StreamAddress, connect, listen

logger = logging.getLogger(__name__)

BEAT_S = 1.0
MAX_LEASES = 64
"""Each lease has a connection to the keeper."""


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


class SourceServer:
    """Answers readers. All methods belong to one thread.

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
        self._leases: dict[bytes, tuple[KeeperClient, float]] = {}

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def answer(self) -> None:
        """Answer all messages that are here. What cannot be read is logged. Raises KeeperLostError."""
        while self.socket.poll(0):
            reader, message = self.socket.recv_multipart()
            try:
                kind, *arguments = json.loads(message)
                if kind == "find":
                    reply = self._find(reader, *arguments)
                    self.socket.send_multipart([reader, json.dumps(reply).encode()])
                elif kind == "beat" and reader in self._leases:
                    self._leases[reader] = self._leases[reader][0], self._until()
                elif kind == "end":
                    self._end(reader)
            except (ValueError, TypeError) as error:
                logger.warning("a message of a reader of KV cannot be read: %r", error)

    def expire(self) -> None:
        """End the leases of readers that have sent no beat."""
        now = time.monotonic()
        for reader, (_, until) in list(self._leases.items()):
            if now > until:
                logger.warning("a reader of KV has sent nothing for %g s", self._lease_s)
                self._end(reader)

    def close(self) -> None:
        """End all leases."""
        for reader in list(self._leases):
            self._end(reader)
        self.socket.close()

    def _until(self) -> float:
        return time.monotonic() + self._lease_s

    def _find(
        self, reader: bytes, compatibility: str, unit_bytes: int, names: list[str]
    ) -> tuple[Any, ...]:
        self._end(reader)
        if len(self._leases) >= MAX_LEASES:
            return "refused", f"{MAX_LEASES} readers are served already"
        client = self._attach()
        if not client.join(bytes.fromhex(compatibility), unit_bytes):
            _leave(client)
            return "refused", "the store has contents of another model, precision or memory layout"
        found = client.find([bytes.fromhex(name) for name in names])
        self._leases[reader] = client, self._until()
        memory = self._registered
        held = [None if it is None else (it[0], it[1]) for it in found]
        return "held", memory.name, base64.b64encode(memory.metadata).decode(), memory.base, held

    def _end(self, reader: bytes) -> None:
        """End the lease of a reader, if it has one: the keeper unpins the contents of the connection."""
        client, _ = self._leases.pop(reader, (None, 0.0))
        if client is not None:
            _leave(client)


def _leave(client: KeeperClient) -> None:
    """End a connection in order, so that the keeper does not wait for its return."""
    client.leave()
    client.close()


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
