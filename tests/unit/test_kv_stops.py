"""Processes that stop without an end: none waits long for the keeper of a node, for a rank, or for a fetch."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.kv_tier_case import TierCase, keeper_config, tier_case
from workers.kv_transfer import keeper, keeper_client, nixl_fetcher
from workers.kv_transfer.connector import Transfer
from workers.kv_transfer.contents import CacheContents
from workers.kv_transfer.keeper import Keeper, KeeperConfig
from workers.kv_transfer.keeper_client import KeeperClient, KeeperStoppedError
from workers.kv_transfer.kv_pull import Fetched
from workers.kv_transfer.kv_source import Form
from workers.kv_transfer.nixl_fetcher import NixlFetcher
from workers.wire.request import EngineRequest, SamplingParams


class Stop:
    """Holds a method of KeeperClient back, until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str):
        self.entered, self.go, self.in_time = threading.Event(), threading.Event(), list[bool]()
        ask = getattr(KeeperClient, method)

        def wait_and_ask(client: KeeperClient, *arguments: Any) -> Any:
            self.entered.set()
            self.in_time.append(self.go.wait(20))
            return ask(client, *arguments)

        monkeypatch.setattr(KeeperClient, method, wait_and_ask)


def bind_anew(case: TierCase) -> None:
    """Bind the caches as a next epoch does."""
    old = case.contents
    case.contents = CacheContents(old.blocks, old.states, old.compatibility, old.device)
    case.tier.bind(case.contents)
    assert case.tier.wait_ready(60)


def test_no_epoch_waits_for_a_keeper_that_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_case("cpu", "heads") as case:
        items = case.blocks([0, 1, 2])
        case.run(Transfer(items), load=False)
        stop = Stop(monkeypatch, "find")
        load = Transfer(items)
        case.tier.load(load)
        assert stop.entered.wait(60)
        case.tier.unbind()
        assert case.tier.ended() == [load] and not load.done
        case.scramble(1)
        before = case.rows(False, [0, 1, 2])
        stop.go.set()
        bind_anew(case)
        assert stop.in_time == [True], "the end of the epoch has waited"
        assert torch.equal(case.rows(False, [0, 1, 2]), before), "the caches were unbound"
        assert not case.tier.ended() and not load.done
        assert case.run(Transfer(items), load=True).done == {item.name for item in items}


def test_no_epoch_waits_for_a_keeper_that_does_not_reserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tier_case("cpu", "heads") as case:
        items, stop = case.blocks([0, 1, 2]), Stop(monkeypatch, "reserve")
        save = Transfer(items)
        case.tier.save(save)
        assert stop.entered.wait(60)
        case.tier.unbind()
        assert case.tier.ended() == [save] and not save.done
        case.scramble(1)
        stop.go.set()
        bind_anew(case)
        assert stop.in_time == [True], "the end of the epoch has waited"
        assert not case.run(Transfer(items), load=True).done, "other bytes were in the places"
        assert case.run(Transfer(items), load=False).done == {item.name for item in items}


def test_no_rank_waits_at_its_end_for_a_keeper_that_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.kv_transfer.host_tier.CLOSE_S", 0.01)
    stop = Stop(monkeypatch, "leave")
    with tier_case("cpu", "heads") as case:
        pass
    assert stop.entered.wait(60)
    stop.go.set()
    case.tier._thread.join(60)
    assert stop.in_time == [True], "the end of the rank has waited"


def test_a_keeper_that_has_stopped_is_not_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = list[tuple[Connection, Connection]]()

    def connect(config: KeeperConfig) -> Connection:
        pairs.append(Pipe())
        return pairs[-1][0]

    monkeypatch.setattr(keeper_client, "_connect", connect)
    monkeypatch.setattr(keeper_client, "ANSWER_S", 0)
    with pytest.raises(KeeperStoppedError):
        KeeperClient(keeper_config(2**16))
    assert len(pairs) == 1


@contextmanager
def closed_late(peer: socket.socket) -> Iterator[list[bool]]:
    """Close a socket much too late, so that nothing waits for ever; yield whether that was done."""
    found = list[bool]()

    def close() -> None:
        found.append(True)
        peer.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(20, close)
    timer.start()
    try:
        yield found
    finally:
        timer.cancel()
        peer.close()


def test_a_request_that_the_keeper_does_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_client, "ANSWER_S", 0.01)
    config = keeper_config(2**16)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(keeper.address_of(config.name))
        listener.listen()
        client = KeeperClient.__new__(KeeperClient)
        client._connection = keeper_client._connect(config)
        peer, _ = listener.accept()
        with closed_late(peer) as closed:
            with pytest.raises(ConnectionError):
                client.forget([bytes(2**24)])
            assert not closed


def test_a_rank_that_stops_in_a_request_does_not_stop_the_keeper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "RANK_S", 0.01)
    config = keeper_config(2**16)
    store = Keeper(config)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as rank:
        listener.bind(keeper.address_of(config.name))
        listener.listen()
        rank.connect(keeper.address_of(config.name))
        connection = keeper._accepted(listener)
        assert connection is not None
        store.add(connection)
        rank.send(b"\0\0")  # the rest does not come
        with closed_late(rank) as closed:
            assert store.answer(connection) is False and not store.connections
            assert not closed
    os.close(store.fd)


class Process:
    """The process of a fetcher, of which the test is the other end."""

    def __init__(self) -> None:
        self.connection, self.other = Pipe()

    def end(self, *, in_order: bool) -> None:
        with suppress(OSError):
            self.connection.close()


def test_a_rank_that_has_paused_reads_all_answers_before_it_gives_a_fetch_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_fetcher, "nixl_unavailable", lambda: None)
    monkeypatch.setattr(nixl_fetcher, "start_thread", lambda *_: threading.Thread())
    fetcher, process = NixlFetcher(keeper_config(2**16), "127.0.0.1", {}), Process()
    fetcher._process = process  # type: ignore[assignment]
    fetcher._form, fetcher.source = Form(b"f" * 16, 512), "here"
    request = EngineRequest(
        request_id="a",
        ingress_id="i",
        prompt_token_ids=[1],
        params=SamplingParams(max_tokens=1),
        kv_source="there",
    )
    transfers = [Transfer([], request), Transfer([], request)]
    for transfer in transfers:
        fetcher.fetch(transfer)
    fetcher._turn()
    for _ in transfers:
        process.other.send(Fetched(process.other.recv().number, {b"name"}))
    fetcher._open = {number: (it, begun - 1e3) for number, (it, begun) in fetcher._open.items()}
    fetcher._turn()
    assert fetcher.ended() == transfers and all(it.done == {b"name"} for it in transfers)
    os.close(fetcher._wake)
