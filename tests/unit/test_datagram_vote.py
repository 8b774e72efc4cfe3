"""Votes between hosts: rows arrive though datagrams are lost, a slow rank is not lost, a silent one is."""

import json
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from kernels.host.awake import AwakeTime
from kernels.host.links import HostNetwork
from workers.engine import datagram_vote
from workers.engine.datagram_vote import _ROWS, DatagramVoteTransport
from workers.parallel import ParallelDims
from workers.step.step_sync import AbortedError, LockstepError

PATIENT_S = 30.0


def gather_of(num_ranks: int) -> list[Callable[[Any], list[Any]]]:
    """A gather for each of `num_ranks` threads."""
    barrier, found = threading.Barrier(num_ranks), [None] * num_ranks

    def gather(rank: int) -> Callable[[Any], list[Any]]:
        def of_rank(value: Any) -> list[Any]:
            found[rank] = json.loads(json.dumps(value))
            barrier.wait()
            return found

        return of_rank

    return [gather(rank) for rank in range(num_ranks)]


@contextmanager
def ranks_on_hosts(
    num_ranks: int, address: str = "127.0.0.1", hang_timeout_s: float = PATIENT_S
) -> Iterator[list[DatagramVoteTransport]]:
    """Transports of ranks, each on a host of its own."""
    dims = ParallelDims(num_ranks=num_ranks, num_nodes=num_ranks)
    network = HostNetwork(address=address, timeout_s=PATIENT_S, hang_timeout_s=hang_timeout_s)
    gathers = gather_of(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        made = [
            pool.submit(DatagramVoteTransport, rank, dims, 7, network, None, gathers[rank])
            for rank in range(num_ranks)
        ]
        transports = [future.result() for future in made]
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()
            transport.close()


def vote(transports: list[DatagramVoteTransport], number: int) -> None:
    """One vote of all ranks; every rank must get all rows."""
    expected = [[number, rank, -(2**62)] for rank in range(len(transports))]
    with ThreadPoolExecutor(len(transports)) as pool:
        rows = [np.array(row, dtype=np.int64) for row in expected]
        found = list(pool.map(lambda t, row: t.all_gather(row).tolist(), transports, rows))
    assert found == [expected] * len(transports)


class LossySocket:
    """A socket that loses the datagrams whose turn is in `lost`."""

    def __init__(self, whole: Any, lost: range):
        self._whole, self._lost, self._turn = whole, lost, -1

    def send(self, data: bytes) -> int:
        self._turn += 1
        return len(data) if self._turn in self._lost else self._whole.send(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_rows_of_all_ranks(address: str):
    with ranks_on_hosts(3, address) as transports:
        for number in range(50):
            vote(transports, number)


def test_lost_datagrams_are_sent_again():
    with ranks_on_hosts(2) as transports:
        vote(transports, 0)
        # Also the first answers to the request are lost.
        peer = transports[1]._peers[0]
        peer.messages = LossySocket(peer.messages, range(3))
        vote(transports, 1)
        assert peer.messages._turn >= 3
        vote(transports, 2)


def test_a_message_is_sent_again_by_a_rank_that_has_gone_on():
    """Rank 1 has all rows and computes; rank 0 must get rank 1's row without a further vote."""
    with ranks_on_hosts(2) as transports:
        peer = transports[1]._peers[0]
        peer.messages = LossySocket(peer.messages, range(1))
        first, second = (np.array([rank], dtype=np.int64) for rank in range(2))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(transports[0].all_gather, first)
            assert transports[1].all_gather(second).tolist() == [[0], [1]]
            assert waiting.result(PATIENT_S).tolist() == [[0], [1]]


def test_a_slow_rank_is_not_lost():
    with ranks_on_hosts(2, hang_timeout_s=0.3) as transports:
        row = np.zeros(1, dtype=np.int64)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(transports[0].all_gather, row)
            time.sleep(1)  # three times the limit for a host without network
            transports[1].all_gather(row)
            assert waiting.result(PATIENT_S).shape == (2, 1)


def test_a_silent_host_is_lost():
    with ranks_on_hosts(2, hang_timeout_s=0.3) as transports:
        transports[1]._parse = lambda message: None  # as if nothing arrived
        with pytest.raises(LockstepError, match=r"rank 1 has not answered for 0\.3 s \(cluster"):
            transports[0].all_gather(np.zeros(1, dtype=np.int64))


def test_a_rank_that_left_is_noticed_at_once():
    with ranks_on_hosts(2) as transports:
        transports[1].close()
        with pytest.raises(LockstepError, match="rank 1 left the group"):
            transports[0].all_gather(np.zeros(1, dtype=np.int64))


def test_the_row_counts_of_a_rank_that_left_behind_it():
    """The kernel reports the closed socket of the peer before the row that arrived earlier."""
    with ranks_on_hosts(2) as transports:
        first, second = (np.array([rank], dtype=np.int64) for rank in range(2))
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(transports[1].all_gather, second)
            assert select.select([transports[0]._peers[0].messages], [], [], PATIENT_S)[0]
            transports[1].abort()
            with pytest.raises(AbortedError):
                leaving.result(PATIENT_S)
        transports[1].close()
        assert transports[0].all_gather(first).tolist() == [[0], [1]]
        with pytest.raises(LockstepError, match="rank 1 left the group"):
            transports[0].all_gather(first)


def test_a_pause_of_this_process_is_no_silence_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, where the peer is paused at the same time."""
    moments: list[float] = []

    def paused() -> float:
        moments.append(100.0 * len(moments))
        return moments[-1]

    monkeypatch.setattr(datagram_vote, "AwakeTime", partial(AwakeTime, clock=paused))
    with ranks_on_hosts(2) as transports, ThreadPoolExecutor(1) as pool:
        row = np.zeros(1, dtype=np.int64)
        waiting = pool.submit(transports[0].all_gather, row)
        while len(moments) < 5 and not waiting.done():
            time.sleep(0.01)
        transports[1].all_gather(row)
        assert waiting.result(PATIENT_S).shape == (2, 1)


def test_an_abort_ends_the_wait():
    with ranks_on_hosts(2) as transports:
        threading.Timer(0.1, transports[0].abort).start()
        with pytest.raises(AbortedError):
            transports[0].all_gather(np.zeros(1, dtype=np.int64))


def test_datagrams_of_another_epoch_or_group_are_dropped():
    with ranks_on_hosts(2) as transports:
        wrong = np.array([5], dtype=np.int64).tobytes()
        rank, secret = transports[1], transports[1]._secret
        sender, forged = rank._peers[0].messages, [b"short"]
        rank._epoch = 6
        forged.append(rank._message(_ROWS, 1, wrong))
        rank._epoch, rank._secret = 7, bytes(32)
        forged.append(rank._message(_ROWS, 1, wrong))
        rank._secret = secret
        for datagram in forged:
            sender.send(datagram)
        rows = [np.array([rank], dtype=np.int64) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda t, row: t.all_gather(row).tolist(), transports, rows))
        assert found == [[[0], [1]]] * 2


class CorruptingSocket(LossySocket):
    """A socket that changes one bit of the datagrams whose turn is in `lost`, each at another place."""

    def send(self, data: bytes) -> int:
        self._turn += 1
        if self._turn in self._lost:
            place = len(data) * self._turn // len(self._lost)
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return self._whole.send(data)


def test_changed_datagrams_are_refused_and_sent_again(caplog):
    """In the digest, the header and the rows: a changed number of tokens would let the ranks plan different steps."""
    with ranks_on_hosts(2) as transports:
        vote(transports, 0)
        peer = transports[1]._peers[0]
        peer.messages = CorruptingSocket(peer.messages, range(5))
        vote(transports, 1)
        assert peer.messages._turn >= 5 and transports[0].num_refused == 5
        vote(transports, 2)
    assert caplog.text.count("dropped a datagram that was changed on its way") == 1


def test_a_rank_that_answers_no_more_fails_at_its_next_vote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its peers would take its host for lost."""

    def broken(transport: DatagramVoteTransport) -> None:
        raise struct.error("a header of 7 bytes")

    monkeypatch.setattr(DatagramVoteTransport, "_answer", broken)
    with ranks_on_hosts(2) as transports:
        transports[0]._answers.join()
        with pytest.raises(LockstepError, match=r"answers its peers no more.* 7 bytes") as failure:
            transports[0].all_gather(np.zeros(2, dtype=np.int64))
        assert failure.value.__cause__ is not None, "this rank is the cause"
