"""The host tier of a CPU: bytes come back equal or not at all, whatever ends meanwhile."""

import queue
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from tests.kv_tier_case import (
    LAYOUTS,
    TierCase,
    damaged_rows,
    keeper_config,
    kill_process,
    second_client,
    there_and_back,
    tier_case,
)
from workers.kv_transfer import keeper_client
from workers.kv_transfer.connector import Transfer
from workers.kv_transfer.host_tier import HostTier
from workers.kv_transfer.keeper_client import KeeperClient


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_contents_there_and_back(layout):
    with tier_case("cpu", layout) as case:
        there_and_back(case)


def test_damaged_rows_are_not_used():
    with tier_case("cpu", "heads") as case:
        damaged_rows(case)


def test_files_that_are_written_late_are_counted_while_the_rank_sleeps(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.kv_transfer.host_tier.COUNTS_S", 0.05)
    with tier_case("cpu", "heads", disk_path=str(tmp_path)) as case:
        woken = queue.SimpleQueue[float]()
        case.tier.on_ended = lambda: woken.put(case.tier.counts().get("disk_used_bytes", 0))
        items = case.blocks([0, 1, 2])
        case.run(Transfer(items), load=False)
        size = 0.0
        while size < len(items) * case.tier._unit_bytes:
            size = woken.get(timeout=60)


def keeper_pid(case: TierCase) -> int:
    inode = f"@phalanx-kv-{case.tier._config.name}"
    assert inode in Path("/proc/net/unix").read_text()
    with second_client(case) as client:
        return int(client._ask("attach")["pid"])


def test_a_killed_keeper_costs_its_contents_and_no_more(monkeypatch):
    monkeypatch.setattr("workers.kv_transfer.host_tier.RETRY_S", 0.1)
    with tier_case("cpu", "heads") as case:
        items = case.blocks([0, 1, 2])
        case.run(Transfer(items), load=False)
        kill_process(keeper_pid(case))
        assert case.run(Transfer(items), load=True).done == set()
        assert case.tier.counts()["lost"] >= 1
        assert case.tier.wait_ready(60), "the tier does not connect again"
        assert case.run(Transfer(items), load=True).done == set()
        assert case.run(Transfer(items), load=False).done == {item.name for item in items}
        assert case.run(Transfer(items), load=True).done == {item.name for item in items}


def test_a_keeper_that_ends_while_a_rank_connects_has_a_successor(monkeypatch):
    connect, tried = keeper_client._connect, []

    def first_to_one_that_ends(config):
        tried.append(config)
        if len(tried) > 1:
            return connect(config)
        ours, theirs = Pipe()
        theirs.close()
        return ours

    with tier_case("cpu", "heads") as case:
        assert keeper_pid(case)
        monkeypatch.setattr(keeper_client, "_connect", first_to_one_that_ends)
        KeeperClient(case.tier._config).close()
        assert len(tried) == 2


def test_forgotten_contents_are_not_found_and_not_saved_late():
    with tier_case("cpu", "heads") as case:
        items = case.blocks([0, 1, 2])
        case.run(Transfer(items), load=False)
        case.tier.forget([items[1].name])
        assert case.run(Transfer(items), load=True).done == {items[0].name, items[2].name}
        assert items[1].name not in case.tier.found(None, [])  # type: ignore[arg-type]
        others, transfer = case.blocks([3, 4], "other"), None
        with case.tier._changed:  # the thread takes no transfer meanwhile
            transfer = Transfer(others)
            case.tier.save(transfer)
            case.tier.forget([others[0].name])
        assert case.end_of(transfer).done == {others[1].name}


def test_what_was_forgotten_without_a_keeper_is_not_found_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.kv_transfer.host_tier.RETRY_S", 1e6)
    with tier_case("cpu", "heads", disk_path=str(tmp_path)) as case:
        items = case.blocks([0, 1, 2])
        case.run(Transfer(items), load=False)
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*/*.kv"))) < 3:
            assert time.monotonic() < deadline, "the files are not written"
            time.sleep(1e-3)
        kill_process(keeper_pid(case))
        assert case.run(Transfer(items), load=True).done == set()
        case.tier.forget([items[1].name])
        case.tier._next_attempt = 0.0
        case.tier.forget([])  # wakes the thread
        assert case.tier.wait_ready(60), "the tier does not connect again"
        found = case.run(Transfer(items), load=True)
        assert found.done == {items[0].name, items[2].name} and found.origin == {"disk": 2}


def test_caches_that_are_bound_while_the_tier_connects_are_used_at_once(monkeypatch):
    for name in ("RETRY_S", "COUNTS_S"):
        monkeypatch.setattr(f"workers.kv_transfer.host_tier.{name}", 1e6)
    connect, caches = HostTier._connect, TierCase(None, torch.device("cpu"), "heads")  # type: ignore[arg-type]

    def connect_before_the_bind(tier: HostTier) -> None:
        connect(tier)
        if tier._contents is None:
            tier.bind(caches.contents)

    monkeypatch.setattr(HostTier, "_connect", connect_before_the_bind)
    tier = HostTier(keeper_config(2**22), torch.device("cpu"))
    try:
        assert tier.wait_ready(20), "the thread sleeps"
        tier.unbind()
    finally:
        tier.close()


def test_nothing_is_left_open_when_caches_are_unbound():
    with tier_case("cpu", "heads") as case:
        transfers = [Transfer(case.blocks([0, 1], str(number))) for number in range(30)]
        for transfer in transfers:
            case.tier.save(transfer)
        case.tier.unbind()
        assert {id(it) for it in case.tier.ended()} == {id(it) for it in transfers}
        late = Transfer(case.blocks([0]))
        case.tier.load(late)
        assert case.tier.ended() == [late] and not late.done


class Event:
    """The end of work of a device, which the test sets."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.awaited = threading.Event()

    def set(self) -> None:
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        self.awaited.set()
        assert self._done.wait(60), "the work does not end"


def test_a_load_does_not_wait_behind_a_save_that_cannot_begin(monkeypatch):
    """Both wait for the device; the load, which was queued later, moves first. Waits are no time of copies."""
    with tier_case("cpu", "heads") as case:
        first = case.run(Transfer(case.blocks([0, 1])), load=False)
        works, order = [Event(), Event()], list[bool]()
        waiting = iter(works)
        monkeypatch.setattr(case.tier, "_launched_work", lambda: next(waiting))
        copies = case.tier._copies
        assert copies is not None
        for is_load, name in ((True, "load"), (False, "save")):
            copy = getattr(copies, name)

            def noted(*arguments, copy=copy, is_load=is_load):
                assert all(work.query() for work in works), "the device still works"
                order.append(is_load)
                return copy(*arguments)

            monkeypatch.setattr(copies, name, noted)
        save, load = Transfer(case.blocks([2, 3], "other")), Transfer(first.items)
        case.tier.save(save)
        assert works[0].awaited.wait(60)
        case.tier.load(load)
        with case.tier._changed:  # the thread sees both ends together
            for work in works:
                work.set()
        ended = list[Transfer]()
        deadline = time.monotonic() + 60
        while len(ended) < 2 and time.monotonic() < deadline:
            ended += case.tier.ended()
            time.sleep(1e-3)
        assert ended == [load, save] and order == [True, False]
        assert load.done == {item.name for item in first.items}
