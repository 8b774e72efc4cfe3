"""ZeroMQ sockets between ranks and ingresses over TCP, encrypted and authenticated (CURVE).

The listener makes a key pair; only processes that received its public key, through Ray, can connect. A connection
that is lost is opened again, but messages on their way may be lost with it, so the messages of a sender are numbered
(`workers.wire.numbering`). A changed message is refused: it ends its connection. Knows nothing of the messages.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import zmq

from workers.wire.numbering import UNCHECKED, numbered

logger = logging.getLogger(__name__)

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

PING_MS = 2000
ANSWER_MS = 5000
"""A peer that does not answer a ping in this time is disconnected: both ends detect a dead connection within 7 s."""


@dataclass(frozen=True)
class StreamAddress:
    """Endpoint and public key of a listener."""

    endpoint: str
    key: bytes


def new_context() -> Context:
    """Return a context of its own. Raises OSError where the process has no descriptors left."""
    with _as_os_error():
        return zmq.Context()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise errors of ZeroMQ as OSError, which callers wait for."""
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"no socket for a stream: {error.strerror}") from error


def listen(context: Context, host: str, kind: int = zmq.PULL) -> tuple[Socket, StreamAddress]:
    """Return a socket on a free port of `host`, for any number of peers, and its address.

    Raises OSError where the process has no descriptors left.
    """
    with _as_os_error():
        socket = _new_socket(context, kind)
        public, secret = zmq.curve_keypair()
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = public, secret
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        port = socket.bind_to_random_port(f"tcp://{host}")
    return socket, StreamAddress(f"tcp://{host}:{port}", public)


class Sender:
    """Sending end of one stream. `send` and `close` may be called from different threads.

    stream     carried by every message, see `workers.wire.numbering`
    num_sent   messages given to `send`

    The constructor raises OSError where the process has no descriptors left.
    """

    def __init__(self, address: StreamAddress, stream: bytes = UNCHECKED):
        self.num_sent = 0
        self._closed = False
        self._address, self._stream = address, stream
        self._lock = threading.Lock()
        self._socket = connect(zmq.Context.instance(), address)

    def send(self, message: bytes, *frames: bytes) -> None:
        """Queue a message until the connection is up; after `close` the message is dropped.

        Without free descriptors a message is lost like one on its way; the next one opens the connection again.

        frames   follow the message as they are; they arrive with it or not at all
        """
        with self._lock:
            if self._closed:
                return
            data = numbered(self._stream, self.num_sent, message), *frames
            self.num_sent += 1
            if self._queue(data):
                return
            # ZeroMQ does not connect again after a message of the peer that it refused, and has dropped the queue.
            was_open = not self._socket.closed
            self._socket.close()
            try:
                self._socket = connect(zmq.Context.instance(), self._address)
            except OSError as error:
                if was_open:
                    logger.warning("messages to %s are lost: %s", self._address.endpoint, error)
            else:
                self._queue(data)

    def _queue(self, data: Sequence[bytes]) -> bool:
        """Return whether the socket takes a message."""
        if self._socket.closed:
            return False
        try:
            self._socket.send_multipart(data, zmq.NOBLOCK, copy=len(data) == 1)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Drop queued messages and disconnect."""
        with self._lock:
            self._closed = True
            self._socket.close()


def connect(context: Context, address: StreamAddress, kind: int = zmq.PUSH) -> Socket:
    """Return a socket to a listener. Raises OSError where the process has no descriptors left."""
    with _as_os_error():
        socket = _new_socket(context, kind)
        if "[" in address.endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = address.key
        socket.connect(address.endpoint)
    return socket


def _new_socket(context: Context, kind: int) -> Socket:
    """Return a socket without limits, so that sending never blocks, which detects dead connections.

    Closing drops queued messages: the supervisor closes the streams of an ingress that does not read.
    """
    socket = context.socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    for option in (zmq.CONNECT_TIMEOUT, zmq.HANDSHAKE_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.TCP_MAXRT):
        socket.setsockopt(option, ANSWER_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    for option in (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL):
        socket.setsockopt(option, max(1, PING_MS // 1000))
    return socket
