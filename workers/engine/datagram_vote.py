"""Votes between ranks of several hosts, by datagrams (UDP): one trip, and no connection that could be reset.

The ranks of a host gather their rows through shared memory first. Then each rank sends the rows of its host to the
rank of the same local index on every other host. A rank that misses a message requests it, and a thread of the peer
sends it again, also while the peer computes or sleeps. An answer without the message shows that the peer lives, so a
host without network is distinguished from a slow rank. Every datagram carries the epoch, and a digest with a secret of
the group: a datagram of others, or one that was changed on its way, is dropped. Knows nothing of the fields of a row.
"""

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from kernels.host.awake import AwakeTime
from kernels.host.links import HostNetwork
from kernels.host.owned import start_thread
from kernels.host.readable import Readable
from kernels.host.shm import SharedMemoryGroup
from workers.engine.vote_transport import AbortableVote, SharedMemoryVoteTransport
from workers.parallel import ParallelDims
from workers.step.step_sync import AbortedError, LockstepError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<4q")  # epoch, kind, number of the vote, rank of the sender
_DIGEST_BYTES = 16  # before the header
_CONTENT = _DIGEST_BYTES + _HEADER.size  # where the rows begin
_ROWS, _ASK, _ALIVE = range(
    3
)  # kinds: the rows of a host; a request for them; an answer without them
_MAX_BYTES = 65536
_ASK_S, _MAX_ASK_S = (
    0.02,
    0.1,
)  # time without a message until the first request, and between later ones


@dataclass(frozen=True)
class VoteEndpoint:
    """The sockets of one rank: a port for the messages of each peer, by rank, and one for requests."""

    address: str
    ports: dict[int, int]
    request_port: int
    secret: bytes

    @classmethod
    def of(cls, fields: Sequence[Any]) -> "VoteEndpoint":
        """Return the endpoint that a rank has gathered."""
        address, ports, request_port, secret = fields
        return cls(address, dict(ports), request_port, bytes.fromhex(secret))


@dataclass
class _Peer:
    """The rank of the same local index on another host, which sends the rows of `ranks`.

    early   messages of later votes by number; a peer is at most one vote ahead
    left    the peer has closed its sockets, perhaps behind its row of this vote
    """

    rank: int
    ranks: slice
    messages: socket.socket
    readable: Readable
    requests: tuple[str, int] = ("", 0)
    early: dict[int, bytes] = field(default_factory=dict)
    left: bool = False


class DatagramVoteTransport(AbortableVote):
    """Ranks of several hosts. The constructor is collective.

    gather          gathers a value of every rank as JSON, in rank order
    shared_memory   of the ranks of this host; None: each rank sends its row alone to all other ranks
    num_refused     datagrams dropped because their digest was wrong
    """

    def __init__(
        self,
        rank: int,
        dims: ParallelDims,
        epoch: int,
        network: HostNetwork,
        shared_memory: SharedMemoryGroup | None,
        gather: Callable[[Any], Sequence[Any]],
    ):
        if shared_memory is None:
            dims = ParallelDims(num_ranks=dims.num_ranks, num_nodes=dims.num_ranks)
        self.num_refused = 0
        self._rank, self._epoch, self._network = rank, epoch, network
        self._num_ranks = dims.num_ranks
        self._own_ranks = _slice(dims.ranks_of_node(dims.node(rank)))
        self._local = SharedMemoryVoteTransport(shared_memory) if shared_memory else None
        nodes = [dims.ranks_of_node(node) for node in range(dims.num_nodes)]
        others = [(ranks, _bound(network.address)) for ranks in nodes if rank not in ranks]
        self._peers = [
            _Peer(ranks[dims.local_rank(rank)], _slice(ranks), messages, Readable(messages))
            for ranks, messages in others
        ]
        self._requests = _bound(network.address)
        self._vote = 0
        self._sent = [(0, b"")] * 2  # number and message of the last two votes
        self._connect(gather)
        self._closing, self._closed = os.eventfd(0), False
        self._failure: BaseException | None = None  # of the thread that answers
        self._answers = start_thread(self._answer, self._fail, "answer-votes")

    def _connect(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        ports = [(peer.rank, peer.messages.getsockname()[1]) for peer in self._peers]
        request_port = self._requests.getsockname()[1]
        own = (self._network.address, ports, request_port, secrets.token_hex(32))
        found = [VoteEndpoint.of(fields) for fields in gather(own)]
        self._secret = found[0].secret
        for peer in self._peers:
            endpoint = found[peer.rank]
            # A connected socket takes datagrams of this peer alone, and reports that the peer has closed its own.
            peer.messages.connect((endpoint.address, endpoint.ports[self._rank]))
            peer.messages.setblocking(False)
            peer.requests = (endpoint.address, endpoint.request_port)

    def _fail(self, error: BaseException) -> None:
        self._failure = error

    def _check_running(self) -> None:
        if self._aborted:
            raise AbortedError
        if self._failure is not None:
            raise LockstepError(
                f"vote: this rank answers its peers no more: {self._failure!r}"
            ) from self._failure

    def _all_gather(self, row: np.ndarray) -> np.ndarray:
        self._check_running()
        own = row[None] if self._local is None else self._local.all_gather(row)
        self._vote += 1
        message = self._message(_ROWS, self._vote, own.tobytes())
        self._sent[self._vote & 1] = (self._vote, message)
        for peer in self._peers:
            with contextlib.suppress(OSError):  # the peer requests what it misses
                peer.messages.send(message)
        rows = np.empty((self._num_ranks, len(row)), dtype=np.int64)
        rows[self._own_ranks] = own
        for peer in self._peers:
            received = np.frombuffer(self._receive(peer), dtype=np.int64, offset=_CONTENT)
            rows[peer.ranks] = received.reshape(-1, len(row))
        return rows

    def _receive(self, peer: _Peer) -> bytes:
        """Return the peer's message of this vote."""
        # A longer wait was a pause of this process, in which the peer may have been paused too.
        awake = AwakeTime(2 * _MAX_ASK_S)
        wait_s, heard_at = _ASK_S, 0.0
        while (found := peer.early.pop(self._vote, None)) is None:
            self._check_running()
            heard, waited_s = self._read(peer, wait_s), awake.look()
            if heard:
                heard_at = waited_s
            else:
                self._check_time(peer, waited_s - heard_at, waited_s)
                self._ask(peer)
                wait_s = min(2 * wait_s, _MAX_ASK_S)
        return found

    def _check_time(self, peer: _Peer, silent_s: float, waited_s: float) -> None:
        network = self._network
        if silent_s > network.hang_timeout_s:
            address, port = peer.messages.getpeername()[:2]
            raise LockstepError(
                f"vote: rank {peer.rank} has not answered for {network.hang_timeout_s:g} s (cluster.hang_timeout_s): "
                f"its host or the network is down, or UDP to {address} port {port} is blocked"
            )
        if waited_s > network.timeout_s:
            raise LockstepError(
                f"vote: rank {peer.rank} sent no row within {network.timeout_s:g} s"
            )

    def _read(self, peer: _Peer, wait_s: float) -> bool:
        """Wait for one datagram of the peer; return whether it is one of this group."""
        try:
            message = peer.messages.recv(_MAX_BYTES)
        except BlockingIOError:
            if peer.left:
                raise LockstepError(f"vote: rank {peer.rank} left the group") from None
            return peer.readable.wait(wait_s) and self._read(peer, 0)
        except ConnectionRefusedError:  # reported before datagrams that have arrived
            peer.left = True
            return self._read(peer, 0)
        except OSError:  # no route at the moment
            time.sleep(_ASK_S)
            return False
        found = self._parse(message)
        if found is None:
            return False
        kind, vote, _ = found
        if kind == _ROWS and vote >= self._vote:
            peer.early[vote] = message
        return True

    def _ask(self, peer: _Peer) -> None:
        """Ask for the peer's message, and send this rank's again."""
        with contextlib.suppress(OSError):
            self._requests.sendto(self._message(_ASK, self._vote), peer.requests)
            peer.messages.send(self._sent[self._vote & 1][1])

    def _answer(self) -> None:
        """Answer requests for messages until `close`."""
        peers = {peer.rank: peer for peer in self._peers}
        waiting = select.poll()
        for source in (self._requests.fileno(), self._closing):
            waiting.register(source, select.POLLIN)
        while self._closing not in dict(waiting.poll()):
            with contextlib.suppress(OSError):
                found = self._parse(self._requests.recv(_MAX_BYTES))
                if found is None or found[0] != _ASK or found[2] not in peers:
                    continue
                _, vote, rank = found
                sent, message = self._sent[vote & 1]
                answer = message if sent == vote else self._message(_ALIVE, vote)
                peers[rank].messages.send(answer)

    def _message(self, kind: int, vote: int, rows: bytes = b"") -> bytes:
        content = _HEADER.pack(self._epoch, kind, vote, self._rank) + rows
        return self._digest(content) + content

    def _digest(self, content: bytes) -> bytes:
        return blake2b(content, digest_size=_DIGEST_BYTES, key=self._secret).digest()

    def _parse(self, message: bytes) -> tuple[int, int, int] | None:
        """Return kind, number of the vote and sender; None for a datagram that was changed, or of another group."""
        digest, content = message[:_DIGEST_BYTES], message[_DIGEST_BYTES:]
        if len(content) < _HEADER.size or not hmac.compare_digest(digest, self._digest(content)):
            self._note_refused()
            return None
        epoch, kind, vote, rank = _HEADER.unpack_from(content)
        return (kind, vote, rank) if epoch == self._epoch else None

    def _note_refused(self) -> None:
        self.num_refused += 1
        if self.num_refused == 1:
            logger.warning(
                "vote: dropped a datagram that was changed on its way, or that no rank of this group has sent"
            )

    def close(self) -> None:
        """End the thread and close the sockets. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._closing, 1)
        self._answers.join()
        os.close(self._closing)
        for closed in (self._requests, *(peer.messages for peer in self._peers)):
            closed.close()


def _bound(address: str) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    found.bind((address, 0))
    return found


def _slice(ranks: range) -> slice:
    return slice(ranks.start, ranks.stop)
