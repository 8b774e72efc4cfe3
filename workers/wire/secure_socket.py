"""ZeroMQ sockets between ranks and ingresses, over TCP, encrypted and closed to strangers (CURVE).

The end that listens makes a key; only who was given it, through Ray, can connect. Knows nothing of what is sent.
"""

import threading
from dataclasses import dataclass

import zmq


@dataclass(frozen=True)
class StreamAddress:
    """Where somebody listens, and its public key."""

    endpoint: str
    key: bytes


def listen(context: zmq.Context, host: str) -> tuple[zmq.Socket, StreamAddress]:
    """A PULL socket on a free port of `host` for any number of senders, and where it is."""
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
    """The end that sends. `send` and `close` may be called from different threads."""

    def __init__(self, address: StreamAddress):
        self._lock = threading.Lock()
        self._socket = _connect(address)

    def send(self, message: bytes) -> None:
        """Queue a message; it waits until the connection stands. After `close` it is dropped: nobody listens."""
        with self._lock:
            if not self._socket.closed:
                self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Drop what is queued and disconnect."""
        with self._lock:
            self._socket.close()


def _connect(address: StreamAddress) -> zmq.Socket:
    """A PUSH socket to a listener."""
    socket = _unbounded(zmq.Context.instance().socket(zmq.PUSH))
    if "[" in address.endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = address.key
    socket.connect(address.endpoint)
    return socket


def _unbounded(socket: zmq.Socket) -> zmq.Socket:
    """Sending never blocks; closing drops what is queued. The supervisor ends who does not read."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
