"""Ordered streams of bytes over TCP between ranks of different hosts.

A send returns at once: bytes that the kernel's buffer does not take are sent by a thread. The kernel notices a peer
that does not answer, so a host without network is distinguished from a slow rank. Knows nothing of tensors.
"""

import contextlib
import errno
import fcntl
import hmac
import queue
import secrets
import select
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernels.host.awake import LOOKS, AwakeTime
from kernels.host.owned import start_thread
from kernels.host.readable import Readable
from kernels.host.shm import LEFT, PeerLeftError

_HELLO = struct.Struct("<32sqq")  # token of the listener, rank and channel of the caller
_HELLO_S = 2.0  # seconds that a caller has for its first bytes
_POLL_S = 0.1  # interval at which a waiting rank checks whether it was aborted
_LOST_PROBES = 2  # unanswered ones, of which the last may be on its way
_WATCH_S = 1.0  # interval at which a thread looks whether the peer has room
_PROBE_S = 1  # seconds without traffic after which the kernel probes a peer, and between probes

_SIOCOUTQNSD = 0x894B  # returns the bytes that the kernel has not sent yet
_TCP_INFO = struct.Struct("=3xB20xI")  # of struct tcp_info: unanswered probes, packets on their way

_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

Bytes = bytes | memoryview  # of unsigned bytes


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """How a rank reaches the ranks of other hosts.

    address         IPv4 or IPv6 address of this host that the other hosts reach
    timeout_s       time for a peer that answers to connect or to send
    hang_timeout_s  time after which a peer that does not answer is lost
    left            ends the wait for peers that connect when it is set
    """

    address: str
    timeout_s: float
    hang_timeout_s: float
    left: threading.Event | None = None


@dataclass(frozen=True)
class Endpoint:
    """The place where a rank listens; a caller presents the token."""

    address: str
    port: int
    token: bytes


class Link:
    """One stream of bytes to `peer` and one back. `send` and `read` belong to one thread."""

    def __init__(self, stream: socket.socket, peer: int, network: HostNetwork):
        self.peer = peer
        self._network, self._stream = network, stream
        self._left = False
        self._readable = Readable(stream)
        self._unsent: queue.SimpleQueue[Bytes | None] = queue.SimpleQueue()
        self._num_unsent = 0
        self._lock = threading.Lock()
        self._sender: threading.Thread | None = None
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        self._bound_silence()

    def send(self, *parts: Bytes) -> None:
        """Send bytes in order, without waiting for the peer. Their content may not change any more."""
        left: Sequence[Bytes] = parts
        if not self._num_unsent:
            try:
                sent = self._stream.sendmsg(parts)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._lost(error) from None
            left = _after(parts, sent)
        # What the kernel has taken may wait there for a peer that is late, which the thread watches.
        if self._sender is None and (left or self._num_waiting()):
            self._sender = start_thread(self._send_rest, lambda error: self.abort(), "send")
        if not left:
            return
        with self._lock:
            self._num_unsent += len(left)
        for part in left:
            self._unsent.put(part)

    def read(self, view: memoryview, *, wait: bool) -> int:
        """Read up to len(view) bytes, at least one; 0 if none has arrived and the caller does not wait for it.

        Raises PeerLeftError or TimeoutError with the number of the peer.
        """
        while True:
            try:
                count = self._stream.recv_into(view)
            except BlockingIOError:
                if not wait:
                    return 0
                self._wait_readable()
                continue
            except OSError as error:
                raise self._lost(error) from None
            if not count:
                raise self._lost(None)
            return count

    def abort(self) -> None:
        """End all waits of this rank and of the peer for this link, from any thread."""
        self._left = True
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave and close the socket, when no thread of this rank waits any more. Safe to call twice."""
        self.abort()
        if self._sender is not None:
            self._unsent.put(None)
            self._sender.join()
            self._sender = None
        self._stream.close()

    def _wait_readable(self) -> None:
        timeout_s = self._network.timeout_s
        awake = AwakeTime(timeout_s / LOOKS)
        while not self._readable.wait(min(_POLL_S, awake.longest_s)):
            if self._left:
                raise self._lost(None)
            if awake.look() > timeout_s:
                raise TimeoutError(f"rank {self.peer} sent nothing within {timeout_s:g} s")

    def _send_rest(self) -> None:
        writable = select.poll()
        writable.register(self._stream, select.POLLOUT)
        while (part := self._next_unsent()) is not None:
            view = memoryview(part)
            while view:
                try:
                    view = view[self._stream.send(view) :]
                except BlockingIOError:
                    self._bound_silence()
                    writable.poll(1000 * _POLL_S)
                except OSError:
                    return  # the thread that reads meets the same error
            with self._lock:
                self._num_unsent -= 1

    def _next_unsent(self) -> Bytes | None:
        """Wait for the next part."""
        watch_s = min(_WATCH_S, self._network.hang_timeout_s / 4)
        while True:
            self._bound_silence()
            with contextlib.suppress(queue.Empty):
                return self._unsent.get(timeout=watch_s)

    def _bound_silence(self) -> None:
        """Set how long the peer may be silent.

        A peer that is late with reading answers, but the kernel counts the time without room there as silence too.
        """
        network, tcp = self._network, socket.IPPROTO_TCP
        with contextlib.suppress(OSError):  # the thread that reads meets the same error
            info = self._stream.getsockopt(tcp, socket.TCP_INFO, _TCP_INFO.size)
            unanswered, on_their_way = _TCP_INFO.unpack(info)
            no_room = self._num_waiting() and not on_their_way and unanswered < _LOST_PROBES
            limit_s = network.timeout_s if no_room else network.hang_timeout_s
            self._stream.setsockopt(tcp, socket.TCP_USER_TIMEOUT, max(1, int(1000 * limit_s)))

    def _num_waiting(self) -> int:
        """Return the bytes that the kernel has taken and not sent yet."""
        found = fcntl.ioctl(self._stream, _SIOCOUTQNSD, bytes(4))
        return int.from_bytes(found, sys.byteorder)

    def _lost(self, error: OSError | None) -> PeerLeftError:
        if self._left:
            return PeerLeftError(LEFT)
        if error is not None and error.errno in _NO_ANSWER:
            return PeerLeftError(
                f"rank {self.peer} has not answered for {self._network.hang_timeout_s:g} s "
                f"(cluster.hang_timeout_s): its host or the network to it is down"
            )
        return PeerLeftError(f"rank {self.peer} left the group{f': {error}' if error else ''}")


class LinkListener:
    """The socket on which a rank accepts links of its peers, while the group is made."""

    def __init__(self, network: HostNetwork):
        self._network = network
        family = socket.AF_INET6 if ":" in network.address else socket.AF_INET
        self._server = socket.create_server((network.address, 0), family=family)
        self.endpoint = Endpoint(
            network.address, self._server.getsockname()[1], secrets.token_bytes(32)
        )

    def open_links(
        self, rank: int, endpoints: Mapping[int, Endpoint], num_channels: int
    ) -> dict[int, list[Link]]:
        """Return `num_channels` links to each peer. Collective; closes the listener.

        endpoints   of the peers, by rank: of each pair the higher rank calls
        """
        awake = AwakeTime(self._network.timeout_s / LOOKS)
        streams: dict[tuple[int, int], socket.socket] = {}
        try:
            for peer in (peer for peer in endpoints if peer < rank):
                for channel in range(num_channels):
                    streams[peer, channel] = self._call(rank, peer, channel, endpoints[peer])
            awaited = {(p, c) for p in endpoints if p > rank for c in range(num_channels)}
            while awaited:
                key, stream = self._accept(awaited, awake)
                awaited.discard(key)
                streams[key] = stream
        except BaseException:
            for stream in streams.values():
                stream.close()
            raise
        finally:
            self._server.close()
        return {
            peer: [Link(streams[peer, c], peer, self._network) for c in range(num_channels)]
            for peer in endpoints
        }

    def _call(self, rank: int, peer: int, channel: int, endpoint: Endpoint) -> socket.socket:
        try:
            stream = socket.create_connection(
                (endpoint.address, endpoint.port),
                self._network.timeout_s,
                (self._network.address, 0),
            )
            stream.sendall(_HELLO.pack(endpoint.token, rank, channel))
        except OSError as error:
            raise ConnectionError(
                f"rank {rank} at {self._network.address} cannot reach rank {peer} at {endpoint.address} port "
                f"{endpoint.port}: {error}"
            ) from None
        return stream

    def _accept(
        self, awaited: set[tuple[int, int]], awake: AwakeTime
    ) -> tuple[tuple[int, int], socket.socket]:
        """Return the next awaited caller; others are refused."""
        while True:
            left_s = self._network.timeout_s - awake.look()
            self._server.settimeout(min(max(1e-3, left_s), _POLL_S, awake.longest_s))
            try:
                stream, _ = self._server.accept()
            except TimeoutError:
                if self._network.left is not None and self._network.left.is_set():
                    raise PeerLeftError(LEFT) from None
                if left_s > 0:
                    continue
                late = ", ".join(map(str, sorted({peer for peer, _ in awaited})))
                raise TimeoutError(
                    f"rank {late} did not connect to {self._network.address} within "
                    f"{self._network.timeout_s:g} s"
                ) from None
            stream.settimeout(_HELLO_S)
            try:
                token, peer, channel = _HELLO.unpack(stream.recv(_HELLO.size, socket.MSG_WAITALL))
            except (OSError, struct.error):
                stream.close()
                continue
            if hmac.compare_digest(token, self.endpoint.token) and (peer, channel) in awaited:
                return (peer, channel), stream
            stream.close()


def _after(parts: Sequence[Bytes], sent: int) -> list[Bytes]:
    """Return what is left of `parts` without the first `sent` bytes."""
    left: list[Bytes] = []
    for part in parts:
        if sent < len(part):
            left.append(memoryview(part)[sent:])
        sent = max(0, sent - len(part))
    return left
