"""Rows cross the network once for each host with any of their experts, and are spread there through shared memory.

A rank exchanges rows with the ranks of the same local index on the other hosts. It puts the rows that it receives
behind its own in its slot, and the ranks of its host read them there as in `shm`. On the way back the partial sums of
a host are added there, so one sum returns for each row that was sent. CPU only.

A send returns at once. Rows that arrive while another ubatch computes are passed on when that ubatch calls the
all-to-all, so the network works beside the compute.

T tokens of this rank, S rows sent to one host, F rows received, N rows in the slots of this host, D hidden, K experts
per token, R routed rows, W bytes of a row.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.payload import RowFormat
from kernels.all2all.shm_rows import Routed, Slots, slot_rows
from kernels.host.links import Endpoint, Link, LinkListener
from kernels.host.shm import SharedMemoryGroup, segment_bytes, shared_memory_unavailable
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.pending import Pending


@dataclass(frozen=True)
class RemoteHost:
    """Another host: its experts, and the links to its rank of the same local index, for rows and for sums."""

    experts: range
    rows: Link
    sums: Link


@dataclass(frozen=True)
class _Sent:
    """The handle of combine.

    routed     rows of this host
    token_S    for each other host: the tokens that were sent there
    counts     rows received from each other host
    """

    routed: Routed
    num_tokens: int
    tokens: list[np.ndarray]
    counts: list[int]


class _Arrival:
    """The messages of one round, one of each link: their rows lie one behind another in `buffer`."""

    def __init__(self, links: Sequence[Link], seq: int, buffer: memoryview, row_bytes: int):
        self.counts: list[int] = []
        self._links, self._seq, self._row_bytes = deque(links), seq, row_bytes
        self._buffer, self._unread = buffer, memoryview(b"")
        self._header = np.empty(2, np.int64)
        self._begin_header()

    def _begin_header(self) -> None:
        self._in_header, self._unread = True, self._header.data.cast("B")

    def _begin_rows(self) -> None:
        seq, count = self._header.tolist()
        size = count * self._row_bytes
        if seq != self._seq or not 0 <= size <= len(self._buffer):
            raise RuntimeError(
                f"rank {self._links[0].peer} sends {count} rows of round {seq}, expected round {self._seq} with at "
                f"most {len(self._buffer) // self._row_bytes} rows"
            )
        self.counts.append(count)
        self._in_header = False
        self._unread, self._buffer = self._buffer[:size], self._buffer[size:]

    def advance(self, *, wait: bool) -> bool:
        """Read all that has arrived, or wait for all messages; return whether they are complete."""
        while self._links:
            while self._unread:
                count = self._links[0].read(self._unread, wait=wait)
                if not count:
                    return False
                self._unread = self._unread[count:]
            if self._in_header:
                self._begin_rows()
            else:
                self._links.popleft()
                self._begin_header()
        return True


class HierarchicalAllToAll(AllToAll):
    """TCP between hosts, slots in shared memory within one. Uses both channels of the SharedMemoryGroup alone."""

    name = "hierarchical"
    devices = ("cpu",)
    auto = "a row crosses the network once for each host, and its host adds the sums that return"
    ubatch_shareable = True  # as shm
    needs_process_group = False

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return shared_memory_unavailable()

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if shape.num_ranks > 1 and shape.num_nodes == 1:
            return "it connects hosts, cluster.nodes is 1"
        return super().unsupported_reason(shape)

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        per_node = shape.num_ranks // shape.num_nodes
        return segment_bytes(per_node, cls.shared_memory_slots(shape)) // per_node

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        rows = 2 * (shape.num_nodes - 1) * shape.max_num_tokens  # sent and received
        return rows * RowFormat.of(shape).row_and_sum_bytes

    @classmethod
    def shared_memory_slots(cls, shape: BackendShape) -> tuple[int, ...]:
        """Return the bytes of a rank's slots for dispatch, with rows of every host, and for combine."""
        sum_bytes = shape.hidden_size * shape.dtype.itemsize
        return (
            shape.num_nodes * shape.max_num_tokens * RowFormat.of(shape).row_bytes,
            shape.num_ranks * shape.max_num_tokens * sum_bytes,
        )

    @classmethod
    def build(cls, context: BackendContext) -> Self:
        assert context.shared_memory is not None, "hierarchical needs a SharedMemoryGroup"
        return cls(
            context.shared_memory,
            _remote_hosts(context),
            context.local_slots,
            RowFormat.of(context.shape),
            context.shape.max_num_tokens,
        )

    def __init__(
        self,
        group: SharedMemoryGroup,
        hosts: Sequence[RemoteHost],
        experts: range,
        row_format: RowFormat,
        max_num_tokens: int,
    ):
        self._hosts, self._format, self._max_num_tokens = hosts, row_format, max_num_tokens
        self._dispatch, self._combine = dispatch, combine = group.channels
        max_rows = (len(hosts) + 1) * max_num_tokens
        self._rows = slot_rows(
            Slots(dispatch.slots, combine.slots, group.rank, experts, row_format, max_rows)
        )
        own_slots = dispatch.slots[:, group.rank, : max_rows * row_format.row_bytes]
        self._own_rows = own_slots.reshape(2, max_rows, row_format.row_bytes)
        self._own_bytes = [memoryview(slot) for slot in own_slots]
        self._num_dispatched = self._num_returned = 0
        self._arriving: deque[_Arrival] = deque()  # of dispatch, not published yet
        self._returning: deque[Pending[torch.Tensor]] = deque()  # results of combine

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        num_tokens = x_TD.shape[0]
        assert num_tokens <= self._max_num_tokens, (num_tokens, self._max_num_tokens)
        self._pass_on()
        parity = self._dispatch.begin()
        self._rows.put(parity, x_TD, topk_idx_TK, topk_weights_TK)
        self._num_dispatched += 1
        own_rows_TW = self._own_rows[parity][:num_tokens]
        ids_TK, tokens = topk_idx_TK.numpy(), []
        for host in self._hosts:
            wanted_TK = (ids_TK >= host.experts.start) & (ids_TK < host.experts.stop)
            token_S = np.flatnonzero(wanted_TK.any(1))
            _send(host.rows, self._num_dispatched, own_rows_TW[token_S])
            tokens.append(token_S)
        row_bytes = self._format.row_bytes
        arrival = _Arrival(
            [host.rows for host in self._hosts],
            self._num_dispatched,
            self._own_bytes[parity][num_tokens * row_bytes :],
            row_bytes,
        )
        self._arriving.append(arrival)

        def complete() -> int:
            arrival.advance(wait=True)
            self._arriving.popleft()
            return num_tokens + sum(arrival.counts)

        def take(parity: int, counts: list[int]) -> ExpertInput:
            taken = self._rows.take(parity, counts)
            self._pass_on()
            return replace(taken, handle=_Sent(taken.handle, num_tokens, tokens, arrival.counts))

        return self._dispatch.publish_later(complete, take)

    def combine(self, y_RD: torch.Tensor, handle: _Sent) -> Pending[torch.Tensor]:
        self._pass_on()
        routed = handle.routed
        self._rows.put_sums(self._combine.begin(), y_RD, routed)
        self._num_returned += 1
        seq = self._num_returned

        def add_and_send(parity: int, counts: list[int]) -> torch.Tensor:
            sums_FD = self._rows.take_sums(parity, routed)
            end = handle.num_tokens
            for host, count in zip(self._hosts, handle.counts, strict=True):
                start, end = end, end + count
                _send(host.sums, seq, _bytes_of(sums_FD[start:end]))
            return sums_FD[: handle.num_tokens]

        local = self._combine.publish(routed.num_rows, add_and_send)
        pending = Pending(lambda: self._finish(pending, local, seq, handle))
        self._returning.append(pending)
        return pending

    def _finish(
        self,
        pending: Pending[torch.Tensor],
        local: Pending[torch.Tensor],
        seq: int,
        handle: _Sent,
    ) -> torch.Tensor:
        """Add the sums of the other hosts, which arrive in the order of the combines, to those of this host."""
        while self._returning[0] is not pending:
            self._returning[0].result()
        sums_TD = local.result()
        token_S = torch.from_numpy(np.concatenate(handle.tokens))
        back_SD = torch.empty(len(token_S), sums_TD.shape[1], dtype=sums_TD.dtype)
        size = sums_TD.shape[1] * sums_TD.itemsize
        arrival = _Arrival(
            [host.sums for host in self._hosts],
            seq,
            _bytes_of(back_SD).reshape(-1).data,
            size,
        )
        arrival.advance(wait=True)
        assert arrival.counts == [len(tokens) for tokens in handle.tokens], arrival.counts
        sums_TD.index_add_(0, token_S, back_SD)
        self._returning.popleft()
        self._pass_on()
        return sums_TD

    def _pass_on(self) -> None:
        """Publish rows that have arrived here, and return sums that this host has complete, without waiting."""
        while self._arriving and self._arriving[0].advance(wait=False):
            self._dispatch.publish_next()
        self._combine.finish_published()

    def abort(self) -> None:
        for host in self._hosts:
            host.rows.abort()
            host.sums.abort()

    def close(self) -> None:
        for host in self._hosts:
            host.rows.close()
            host.sums.close()


def _send(link: Link, seq: int, rows: np.ndarray) -> None:
    """Send one message of rows, uint8 [S, W]; see _Arrival."""
    header = np.array((seq, len(rows)), np.int64)
    link.send(header.data.cast("B"), rows.reshape(-1).data)


def _bytes_of(rows_SD: torch.Tensor) -> np.ndarray:
    """Return a contiguous tensor as uint8 [S, bytes of a row]."""
    found: np.ndarray = rows_SD.view(torch.uint8).numpy()
    return found


def _remote_hosts(context: BackendContext) -> list[RemoteHost]:
    """Connect this rank to the ranks of its local index. Collective."""
    shape, rank, network = context.shape, context.rank, context.network
    assert network is not None and context.gather is not None, "hierarchical needs other hosts"
    per_node = shape.num_ranks // shape.num_nodes
    listener = LinkListener(network)
    own = listener.endpoint
    found = context.gather((own.address, own.port, own.token.hex()))
    endpoints = [Endpoint(address, port, bytes.fromhex(token)) for address, port, token in found]
    peers = range(rank % per_node, shape.num_ranks, per_node)
    links = listener.open_links(rank, {peer: endpoints[peer] for peer in peers if peer != rank}, 2)
    hosts = []
    for peer, (rows, sums) in links.items():
        first = peer - peer % per_node
        starts = context.expert_map.starts
        hosts.append(RemoteHost(range(starts[first], starts[first + per_node]), rows, sums))
    return hosts
