"""ZeroMQ sockets between ranks and ingresses over TCP, encrypted and authenticated (CURVE).

The listener makes a key pair; only processes that received its public key, through Ray, can connect. Knows nothing of
the messages.
"""

import threading
from dataclasses import dataclass
from typing import TypeAlias

import zmq

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"


@dataclass(frozen=True)
class StreamAddress:
    """Endpoint and public key of a listener."""

    endpoint: str
    key: bytes


def listen(context: Context, host: str) -> tuple[Socket, StreamAddress]:
    """Return a PULL socket on a free port of `host`, for any number of senders, and its address."""
    socket = _unbounded(context.socket(zmq.PULL))
    public, secret = zmq.curve_keypair()
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = public, secret
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
        host = f"[{host}]"
    port = socket.bind_to_random_port(f"tcp://{host}")
    return socket, StreamAddress(f"tcp://{host}:{port}", public)


class Sender:
    """Sending end. `send` and `close` may be called from different threads."""

    def __init__(self, address: StreamAddress):
        self._lock = threading.Lock()
        self._socket = _connect(address)

    def send(self, message: bytes) -> None:
        """Queue a message until the connection is up; after `close` the message is dropped."""
        with self._lock:
            if not self._socket.closed:
                self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Drop queued messages and disconnect."""
        with self._lock:
            self._socket.close()


def _connect(address: StreamAddress) -> Socket:
    """Return a PUSH socket to a listener."""
    socket = _unbounded(zmq.Context.instance().socket(zmq.PUSH))
    if "[" in address.endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = address.key
    socket.connect(address.endpoint)
    return socket


def _unbounded(socket: Socket) -> Socket:
    """Lift the limits of a socket: sending never blocks, closing drops queued messages.

    The supervisor closes the streams of an ingress that does not read.
    """
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
