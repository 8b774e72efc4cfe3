"""Errors in the keeper of a node: the request fails, the process and the contents of the other ranks stay."""

import os
import resource
import socket
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.kv_tier_case import keeper_config
from workers.kv_transfer import keeper
from workers.kv_transfer.host_index import Place
from workers.kv_transfer.keeper import Keeper, RequestFailed
from workers.kv_transfer.keeper_client import KeeperClient, KeeperLostError

FORM = b"f" * 16
PLACES = [Place(bytes([number]) * 32, b"", b"", 0, 1) for number in range(64)]


class Store:
    """A keeper of 64 units with two ranks."""

    def __init__(self) -> None:
        self.keeper = Keeper(keeper_config(2**16))
        self.connections: list[tuple[Connection, Connection]] = []
        for _ in range(2):
            own, other = Pipe()
            self.keeper.add(own)
            self.connections.append((own, other))
            assert self.ask(len(self.connections) - 1, "layout", FORM, 1024, 0) == 64

    def ask(self, rank: int, *message: Any) -> Any:
        """The keeper's answer to a request."""
        self.connections[rank][1].send(message)
        assert self.keeper.answer(self.connections[rank][0]) is False
        return self.connections[rank][1].recv()


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    os.close(store.keeper.fd)


def assert_goes_on(store: Store, answer: Any, num_free: int) -> None:
    """The rank 1, which sent the request, is dropped; rank 0 finds its contents, and `num_free` units."""
    assert isinstance(answer, RequestFailed) and "Error" in answer.reason
    assert store.keeper.connections == [store.connections[0][0]]
    with pytest.raises(EOFError):
        store.connections[1][1].recv()
    assert store.ask(0, "counts")["errors"] == 1
    assert None not in store.ask(0, "find", [place.name for place in PLACES[:32]])
    assert None not in store.ask(0, "reserve", PLACES[-num_free:])


@pytest.mark.parametrize("request_", [("nonsense",), ("find", 7), ("reserve",), (7,)])
def test_a_request_that_fails_ends_neither_the_keeper_nor_the_contents(
    store: Store, request_: tuple[Any, ...]
) -> None:
    assert None not in store.ask(0, "reserve", PLACES[:32])
    store.ask(0, "publish", {place.name: 1 for place in PLACES[:32]})
    assert None not in store.ask(1, "reserve", PLACES[32:])
    assert_goes_on(store, store.ask(1, *request_), 32)


def test_an_error_in_the_middle_of_a_request(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some contents are pinned by then."""
    store.ask(0, "reserve", PLACES[:32])
    store.ask(0, "publish", {place.name: 1 for place in PLACES[:32]})
    get, names = store.keeper._index.get, [place.name for place in PLACES[:32]]
    with monkeypatch.context() as patch:
        patch.setattr(
            store.keeper._index, "get", lambda name: {}["a bug"] if name == names[9] else get(name)
        )
        answer = store.ask(1, "find", names)
    assert_goes_on(store, answer, 32)
    store.ask(0, "release", [])
    assert all(entry.num_pins == 0 for entry in map(get, names) if entry is not None)


def test_a_rank_learns_why_its_request_has_failed() -> None:
    own, other = Pipe()
    client = KeeperClient.__new__(KeeperClient)
    client._connection = own
    other.send(RequestFailed("KeyError('a bug')"))
    with pytest.raises(KeeperLostError, match=r"the keeper failed in find: KeyError\('a bug'\)"):
        client.find([b"name"])
    assert own.closed


def test_a_keeper_without_descriptors_lets_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "ACCEPT_RETRY_S", 0)
    address = keeper.address_of(keeper_config(2**16).name)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as rank:
        listener.bind(address)
        listener.listen()
        rank.connect(address)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            assert keeper._accepted(listener) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        connection = keeper._accepted(listener)
        assert connection is not None
        connection.close()
