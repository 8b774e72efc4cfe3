"""What ranks and threads do to the store of a node at the same time, in an order that each test sets."""

import os
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kernels.host.processes import start_ticks
from tests.kv_tier_case import kill_process
from tests.unit.test_kv_store import FORM, chain, keeper_config, read, tier, write
from workers.kv_transfer import disk_tier, keeper_client
from workers.kv_transfer.host_index import HostIndex
from workers.kv_transfer.keeper import Keeper, KeeperConfig
from workers.kv_transfer.keeper_client import KeeperClient

__all__ = ["keeper_config"]  # a fixture


class Store:
    """A keeper in this process, with ranks that send requests."""

    def __init__(self, num_ranks: int, disk_path: Path | None = None):
        owner = os.getpid(), start_ticks(os.getpid())
        folder = None if disk_path is None else str(disk_path)
        config = KeeperConfig("test", 2**16, owner, disk_path=folder, disk_bytes=2**20)
        self.keeper, self.ranks = Keeper(config), list[Connection]()
        self.ends: dict[Connection, Connection] = {}
        for _ in range(num_ranks):
            rank, end = Pipe()
            self.keeper.add(end)
            self.ranks.append(rank)
            self.ends[rank] = end

    def ask(self, rank: int, *request: Any) -> Any:
        self.ranks[rank].send(request)
        self.keeper.answer(self.ends[self.ranks[rank]])
        return self.ranks[rank].recv()


def test_a_rank_that_is_dropped_while_its_request_waits_does_not_end_the_keeper():
    store = Store(2)
    store.ask(0, "layout", FORM, 1024, 0)
    store.ranks[0].send(("counts",))  # both requests are there when the keeper looks
    store.ask(1, "layout", b"g" * 16, 2048, 0)
    assert store.keeper.answer(store.ends[store.ranks[0]]) is False
    assert store.ask(1, "counts")["used_bytes"] == 0


def test_contents_that_another_rank_forgets_while_they_are_written_are_not_entered(tmp_path):
    store, places = Store(2, tmp_path), chain("a", 1)
    (place,) = places
    for rank in (0, 1):
        store.ask(rank, "layout", FORM, 1024, 0)
    store.ask(0, "reserve", places)
    store.ask(1, "forget", [place.name])
    assert store.ask(1, "reserve", places) != [None]
    store.ask(0, "publish", {place.name: 1})
    assert store.ask(0, "find", [place.name]) == [None] and place.name not in store.keeper._hints
    store.ask(1, "publish", {place.name: 2})
    ((_, check, _),) = store.ask(0, "find", [place.name])
    assert check == 2
    store.keeper.close()


def test_a_writer_that_is_lost_leaves_what_another_rank_has_written_since():
    index, (place,) = HostIndex(4), chain("a", 1)
    lost = index.reserve(place)
    index.forget([place.name])
    entry = index.reserve(place)
    assert lost is not None and entry is not None and index.publish(entry, 1)
    index.discard(lost)
    assert index.get(place.name) is entry and index.num_free == 3
    index.check_integrity()


def test_a_file_that_makes_room_while_it_is_read_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place,), store, fill = chain("a", 1), tier(tmp_path), disk_tier._fill
    write(store, [place])

    def fill_late(fd: int, row: memoryview) -> bool:
        store.forget(place.name)
        return fill(fd, row)

    monkeypatch.setattr(disk_tier, "_fill", fill_late)
    assert read(store, place) == b"\7" * 1000 and place.name not in store
    store.close()


def test_what_is_forgotten_while_it_is_written_gets_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place, other), store, opened = chain("a", 2), tier(tmp_path), os.open

    def open_late(path: Any, *arguments: Any) -> int:
        if place.name.hex() in str(path):
            store.forget(place.name)
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", open_late)
    write(store, [place, other])
    monkeypatch.undo()
    assert store.names() == [other.name]
    assert [path.suffix for path in (tmp_path / "phalanx-kv").iterdir() if path.suffix] == [".kv"]
    write(store, [place])
    assert read(store, place) is not None, "later contents of the name have one"
    store.close()


def test_files_beyond_the_bound_are_deleted_at_the_start_and_were_never_entered(tmp_path):
    first = tier(tmp_path)
    write(first, chain("a", 3))
    first.close()
    again = tier(tmp_path, num_bytes=2500)
    assert list(again.changes) == [(name, True) for name in again.names()]
    assert len(again.names()) == 2
    again.close()


def test_a_keeper_that_ends_behind_its_answer_has_a_successor(keeper_config, monkeypatch):
    ask, tried = KeeperClient._ask, list[int]()

    def ask_and_lose(client: KeeperClient, kind: str, *arguments: object) -> Any:
        answer = ask(client, kind, *arguments)
        if kind == "attach":
            tried.append(answer["pid"])
        if len(tried) == 1:
            kill_process(answer["pid"])
        return answer

    monkeypatch.setattr(KeeperClient, "_ask", ask_and_lose)
    client = KeeperClient(keeper_config)
    assert len(set(tried)) == 2 and client.counts()["evicted"] == 0
    client.leave()
    client.close()


def test_a_keeper_that_ends_before_a_rank_connects_is_started_again(keeper_config, monkeypatch):
    start, started = keeper_client._start, list[KeeperConfig]()

    def start_in_vain_first(config: KeeperConfig) -> None:
        """What starts finds the address of a keeper that then ends."""
        started.append(config)
        if len(started) > 1:
            start(config)

    monkeypatch.setattr(keeper_client, "_start", start_in_vain_first)
    client = KeeperClient(keeper_config)
    assert len(started) == 2
    client.leave()
    client.close()


def test_what_is_forgotten_before_there_is_a_form_is_not_found_in_a_file(tmp_path):
    earlier, places = Store(1, tmp_path), chain("a", 2)
    earlier.ask(0, "layout", FORM, 1024, 0)
    earlier.ask(0, "reserve", places)
    earlier.ask(0, "publish", {place.name: 1 for place in places})
    earlier.keeper.close()
    store, (wrong, right) = Store(1, tmp_path), (place.name for place in places)
    store.ask(0, "forget", [wrong])  # a rank that is between two epochs
    store.ask(0, "layout", FORM, 1024, 0)
    found = store.ask(0, "find", [wrong, right])
    assert found[0] is None and found[1] is not None
    assert wrong not in store.keeper._hints
    store.keeper.close()
