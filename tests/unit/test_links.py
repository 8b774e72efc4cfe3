"""Links between hosts: whole messages in order whatever their size, refused strangers, peers that left."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kernels.host import links
from kernels.host.awake import AwakeTime
from kernels.host.links import HostNetwork, Link, LinkListener
from kernels.host.shm import PeerLeftError

NETWORK = HostNetwork(address="127.0.0.1", timeout_s=30, hang_timeout_s=30)
LARGE = 64 << 20  # more than the buffers of two sockets


@contextmanager
def two_ranks(network: HostNetwork = NETWORK) -> Iterator[tuple[Link, Link]]:
    """A link as rank 0 and as rank 1 have it."""
    listeners = [LinkListener(network) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        opened = [
            pool.submit(listeners[rank].open_links, rank, {peer: listeners[peer].endpoint}, 1)
            for rank, peer in ((0, 1), (1, 0))
        ]
        (first,), (second,) = (links for f in opened for links in f.result().values())
    try:
        yield first, second
    finally:
        first.close()
        second.close()
        second.close()


def read(link: Link, size: int) -> bytes:
    """The next `size` bytes of a link."""
    found = bytearray(size)
    view = memoryview(found)
    while view:
        view = view[link.read(view, wait=True) :]
    return bytes(found)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_large_messages_both_ways_before_either_is_read(address: str):
    with two_ranks(replace(NETWORK, address=address)) as links:
        sent = [np.random.default_rng(n).integers(0, 256, LARGE, np.uint8) for n in range(2)]
        for link, data in zip(links, sent, strict=True):
            link.send(b"first", memoryview(data), b"last")
            link.send(b"more")
        with ThreadPoolExecutor(2) as pool:
            size = LARGE + len(b"firstlastmore")
            found = list(pool.map(lambda link: read(link, size), links))
        for data, of_peer in zip(found, reversed(sent), strict=True):
            assert data == b"first" + of_peer.tobytes() + b"lastmore"


def silence_ms(link: Link) -> int:
    """The time without an answer, or without room at the peer, after which the kernel gives the peer up."""
    return link._stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("size", [1 << 20, 16 << 20], ids=["in the kernel", "beyond the kernel"])
def test_a_peer_that_reads_late_is_not_lost(monkeypatch: pytest.MonkeyPatch, size: int):
    """It may compute for so long as a rank waits for its peers; the kernel ended its connection after 5 s."""
    monkeypatch.setattr(links, "_WATCH_S", 0.01)
    network = replace(NETWORK, timeout_s=90, hang_timeout_s=30)
    with two_ranks(network) as (first, second):
        assert silence_ms(first) == 30_000
        first.send(bytes(size))
        wait_for(lambda: silence_ms(first) == 90_000)
        read(second, size)
        wait_for(lambda: silence_ms(first) == 30_000)
        first.send(b"next")
        assert read(second, 4) == b"next"


def test_nothing_to_read_yet():
    with two_ranks() as (first, second):
        assert first.read(memoryview(bytearray(1)), wait=False) == 0
        second.send(b"x")
        assert read(first, 1) == b"x"


def test_a_slow_peer():
    with two_ranks() as (first, _):
        first._network = replace(NETWORK, timeout_s=0.2)  # the ranks had longer to connect
        with pytest.raises(TimeoutError, match=r"rank 1 sent nothing within 0\.2 s"):
            read(first, 1)


def test_a_pause_of_this_rank_is_no_silence_of_its_peer(monkeypatch: pytest.MonkeyPatch):
    """The peer sends some looks after it, because it was paused too."""
    num_calls = 0

    def clock_with_a_stop() -> float:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            second.send(b"x")
        return 1000.0 if num_calls > 1 else 0.0

    with two_ranks() as (first, second):
        monkeypatch.setattr(links, "AwakeTime", partial(AwakeTime, clock=clock_with_a_stop))
        assert read(first, 1) == b"x"
        assert num_calls == 4


@pytest.mark.parametrize("end", [Link.abort, Link.close])
def test_a_peer_that_left(end: Callable[[Link], None]):
    with two_ranks() as (first, second):
        second.send(b"last")
        threading.Timer(0.1, end, [second]).start()
        assert read(first, 4) == b"last"
        with pytest.raises(PeerLeftError, match="rank 1 left the group"):
            read(first, 1)


def test_an_abort_ends_the_wait_of_this_rank():
    with two_ranks() as (first, _):
        threading.Timer(0.1, first.abort).start()
        with pytest.raises(PeerLeftError, match="this rank left"):
            read(first, 1)


def test_close_ends_a_send_that_no_peer_reads():
    with two_ranks() as (first, _):
        first.send(memoryview(bytes(LARGE)))
        first.close()


def test_a_rank_that_leaves_waits_for_no_caller():
    """A peer has failed before it called; the process of a rank that does not leave in time is replaced."""
    left = threading.Event()
    left.set()
    listener = LinkListener(replace(NETWORK, left=left))
    with pytest.raises(PeerLeftError, match="this rank left"):
        listener.open_links(0, {1: listener.endpoint}, 1)


def test_strangers_are_refused():
    listeners = [LinkListener(NETWORK) for _ in range(2)]
    endpoints = [listener.endpoint for listener in listeners]
    place = (endpoints[0].address, endpoints[0].port)
    with socket.create_connection(place) as wrong, socket.create_connection(place) as short:
        wrong.sendall(os.urandom(48))
        short.close()
        with ThreadPoolExecutor(2) as pool:
            opened = [
                pool.submit(listeners[rank].open_links, rank, {peer: endpoints[peer]}, 1)
                for rank, peer in ((0, 1), (1, 0))
            ]
            links = [link for f in opened for of_peer in f.result().values() for link in of_peer]
        assert wrong.recv(1) == b""
    links[0].send(b"hello")
    assert read(links[1], 5) == b"hello"
    for link in links:
        link.close()


def test_an_address_without_a_listener():
    listener = LinkListener(NETWORK)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # no other socket gets the port, and this one does not listen
        port = closed.getsockname()[1]
        nobody = replace(listener.endpoint, port=port)
        with pytest.raises(
            ConnectionError, match=rf"rank 1 at 127\.0\.0\.1 cannot reach rank 0 .* {port}"
        ):
            listener.open_links(1, {0: nobody}, 1)
