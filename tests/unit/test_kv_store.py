"""The store of a node without ranks: what leaves first, what stays, files, and the keeper process with its clients."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest

from kernels.host.processes import start_ticks
from workers.kv_transfer import disk_tier
from workers.kv_transfer.disk_tier import DiskTier
from workers.kv_transfer.hints import Hints, hint_bytes
from workers.kv_transfer.host_index import Entry, HostIndex, Place
from workers.kv_transfer.keeper import Keeper, KeeperConfig
from workers.kv_transfer.keeper_client import KeeperClient, KeeperLostError

FORM = b"f" * 16


def key(*path: object) -> bytes:
    return blake2b(repr(path).encode(), digest_size=32).digest()


def chain(name: str, length: int, suffix: bytes = b"", units: int = 1) -> list[Place]:
    """The places of the first blocks of a chain of its own."""
    keys = [b"", *(key(name, number) for number in range(length))]
    return [Place(keys[n + 1], suffix, keys[n], n, units) for n in range(length)]


def fill(index: HostIndex, places: list[Place]) -> list[Entry | None]:
    entries = [index.reserve(place) for place in places]
    for entry in entries:
        if entry is not None:
            index.publish(entry, 1)
    return entries


def there(index: HostIndex, places: list[Place]) -> list[int]:
    return [place.number for place in places if index.get(place.name) is not None]


def test_the_last_blocks_of_the_oldest_session_leave_first():
    index = HostIndex(8)
    old, new, more = chain("old", 4), chain("new", 4), chain("more", 3)
    for places in (old, new, more):
        fill(index, places)
        index.check_integrity()
    assert there(index, old) == [0] and there(index, new) == [0, 1, 2, 3] and len(index) == 8
    assert index.evicted == [place.name for place in old[:0:-1]]


def test_a_session_that_is_used_stays_and_a_costly_one_stays_longer():
    index = HostIndex(6)
    used, cheap = chain("used", 3), chain("cheap", 3)
    fill(index, used)
    fill(index, cheap)
    fill(index, chain("a", 1))
    assert there(index, cheap) == [0, 1, 2], "the older one lost its last block"
    for place in used[:2]:
        entry = index.get(place.name)
        assert entry is not None
        index.pin(entry)
        index.unpin(entry)
    fill(index, chain("b", 1))
    assert there(index, used) == [0, 1] and there(index, cheap) == [0, 1]
    costly = HostIndex(2)
    fill(costly, [Place(key("far"), b"", b"", 5000, 1)])
    fill(costly, chain("near", 1))
    fill(costly, chain("next", 1))
    assert costly.get(key("far")) is not None, "it costs ten times as much as the younger one"


def test_a_state_that_a_later_turn_has_superseded_leaves_before_all():
    index = HostIndex(10)
    blocks = chain("session", 4)
    fill(index, blocks)
    states = [place._replace(suffix=b"s", num_units=2) for place in (blocks[1], blocks[3])]
    fill(index, states)
    fill(index, chain("other", 3))
    assert index.get(states[0].name) is None and index.get(states[1].name) is not None
    assert there(index, blocks) == [0, 1, 2, 3]


def test_a_state_where_sessions_part_is_not_superseded():
    index = HostIndex(20)
    stem = chain("stem", 2)
    fill(index, stem)
    tails = [Place(key("tail", n), b"", stem[1].key, 2, 1) for n in range(2)]
    fill(index, tails)
    parting = stem[1]._replace(suffix=b"s")
    entry = fill(index, [parting])[0]
    fill(index, [tails[0]._replace(suffix=b"s")])
    assert entry is not None and not entry.superseded


def test_blocks_behind_the_last_window_leave_before_all():
    index = HostIndex(6, window_blocks=2)
    places = chain("session", 5, b"w")
    fill(index, places)
    fill(index, chain("other", 3))
    assert there(index, places) == [2, 3, 4]


def test_what_is_used_stays_and_what_is_too_large_is_refused():
    index = HostIndex(2)
    places = chain("a", 2)
    entries = [index.reserve(place) for place in places]
    assert None not in entries and index.reserve(chain("b", 1)[0]) is None
    assert index.reserve(chain("c", 1, units=3)[0]) is None
    assert index.get(places[0].name) is None, "it is not filled yet"
    index.forget([places[0].name])
    assert index.num_free == 0, "its writer still writes"
    index.unpin(entries[0])  # type: ignore[arg-type]
    assert index.num_free == 1


def test_a_chain_does_not_push_out_the_block_that_it_follows():
    index = HostIndex(2)
    places = chain("a", 3)
    fill(index, places)
    assert there(index, places) == [0, 1]


def test_random_use_of_an_index():
    chance, index = random.Random(3), HostIndex(40, window_blocks=2)
    chains = [chain(str(n), 8) for n in range(12)]
    pinned: list[Entry] = []
    for _ in range(3000):
        places = chance.choice(chains)[: chance.randint(1, 8)]
        what = chance.random()
        if what < 0.5:
            suffix, units = chance.choice([(b"", 1), (b"w", 1), (b"s", 3)])
            fill(index, [place._replace(suffix=suffix, num_units=units) for place in places])
        elif what < 0.7 and (entry := index.get(places[-1].name)) is not None:
            index.pin(entry)
            pinned.append(entry)
        elif what < 0.8 and not pinned:
            index.forget([places[-1].name])
        while pinned and (len(pinned) > 6 or what > 0.9):
            index.unpin(pinned.pop())
        index.check_integrity()
    assert index.num_evicted > 500


def test_hints_have_every_name_and_few_others():
    names = [key(n) + suffix for n in range(2000) for suffix in (b"", b"s")]
    counts = memoryview(bytearray(hint_bytes(len(names))))
    hints = Hints(counts)
    for name in names:
        hints.add(name)
    assert all(name in hints for name in names)
    others = sum(key("other", n) in hints for n in range(4000))
    assert others < 40
    for name in names:
        hints.remove(name)
    assert not any(counts)


def tier(folder: Path, num_bytes: int = 2**20, form: bytes = FORM) -> DiskTier:
    return DiskTier(str(folder), num_bytes, form)


def write(store: DiskTier, places: list[Place], byte: int = 7) -> None:
    for place in places:
        store.offer(place, byte, [memoryview(bytes([byte]) * 1000)])
    deadline = time.monotonic() + 60
    while store._queued:
        assert time.monotonic() < deadline, "the files are not written"
        time.sleep(0.002)


def read(store: DiskTier, place: Place) -> bytes | None:
    if store.place_of(place.name) != place:
        return None
    row = bytearray(1000)
    return None if store.read(place.name, [memoryview(row)]) is None else bytes(row)


def test_files_outlive_their_server(tmp_path):
    places, first = chain("a", 3), tier(tmp_path)
    write(first, places)
    write(first, [chain("b", 1)[0]])
    first.close()
    again = tier(tmp_path)
    assert len(again.names()) == 4 and read(again, places[2]) == b"\7" * 1000
    assert again.counts()["disk_read_bytes"] == 1000
    again.close()


class Waiting:
    """A connection of a rank that waits for the answer to its first request; `send` notes which names it may find."""

    def __init__(self, keeper: Keeper, names: list[bytes]):
        self._hints, self._names, self.found = keeper._hints, names, [False]

    def recv(self) -> tuple[object, ...]:
        return "layout", FORM, 1000, 0

    def send(self, num_units: int) -> None:
        self.found = [name in self._hints for name in self._names]


def test_a_rank_finds_the_names_of_files_from_the_first_answer_on(tmp_path, keeper_config):
    places, first = chain("a", 3), tier(tmp_path, form=blake2b(FORM, digest_size=16).digest())
    write(first, places)
    first.close()
    keeper = Keeper(replace(keeper_config, disk_path=str(tmp_path), disk_bytes=2**20))
    rank = Waiting(keeper, [place.name for place in places])
    keeper.add(rank)
    keeper.answer(rank)
    keeper.close()
    os.close(keeper.fd)
    assert rank.found == [True] * 3


@pytest.mark.parametrize(
    ("harm", "count"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: os.truncate(path, 500), "damaged"),
        (lambda path: os.truncate(path, 20), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged"),
        (lambda path: path.write_bytes(b"PHXKV\0\0\2" + path.read_bytes()[8:]), "stale"),
        (lambda path: path.write_bytes(b"\0" * path.stat().st_size), "stale"),
    ],
    ids=["deleted", "torn", "torn header", "short", "other version", "zeros"],
)
def test_files_that_are_not_what_they_were(tmp_path, harm, count):
    (place,), store = chain("a", 1), tier(tmp_path)
    write(store, [place])
    (path,) = (tmp_path / "phalanx-kv").glob("*.kv")
    harm(path)
    assert read(store, place) is None and place.name not in store
    assert store.counts()[f"disk_{count}"] == 1
    assert not list((tmp_path / "phalanx-kv").glob("*.kv"))
    write(store, [place])
    assert read(store, place) is not None, "it is written anew"
    store.close()


def test_files_of_other_contents_are_deleted_and_no_others(tmp_path):
    store = tier(tmp_path)
    write(store, chain("a", 2))
    store.close()
    own = tmp_path / "phalanx-kv" / "notes.txt"
    own.write_text("mine")
    (tmp_path / "phalanx-kv" / "x.draft").touch()
    other = tier(tmp_path, form=b"g" * 16)
    assert not other.names() and own.exists() and other.counts()["disk_stale"] == 3
    other.close()


def test_files_keep_their_bound_and_one_server_a_folder(tmp_path):
    store = tier(tmp_path, num_bytes=5000)
    places = chain("a", 8)
    write(store, places)
    files = list((tmp_path / "phalanx-kv").glob("*.kv"))
    assert sum(path.stat().st_size for path in files) <= 5000 and len(files) == 4
    assert places[7].name in store and places[0].name not in store
    second = tier(tmp_path)
    write(second, places)
    assert second.counts()["disk_errors"] == 1 and not second.names()
    second.close()
    store.close()


def test_a_full_disk_is_left_alone_for_a_while(tmp_path, monkeypatch):
    store = tier(tmp_path)
    monkeypatch.setattr(disk_tier, "FULL_PAUSE_S", 1e6)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_tier.Path, "rename", full)
        write(store, chain("a", 1))
    assert store.counts()["disk_errors"] == 1
    assert not [path for path in (tmp_path / "phalanx-kv").iterdir() if path.name != "lock"]
    write(store, chain("b", 1))
    assert not store.names(), "it pauses"
    monkeypatch.setattr(store, "_blocked_until", 0.0)
    write(store, chain("b", 1))
    assert len(store.names()) == 1
    store.close()


@pytest.fixture
def keeper_config() -> KeeperConfig:
    owner = os.getpid(), start_ticks(os.getpid())
    return KeeperConfig(name=os.urandom(16).hex(), num_bytes=2**16, owner=owner)


def ended(config: KeeperConfig) -> bool:
    """Whether the keeper has given its address back."""
    address = f"@phalanx-kv-{config.name}"
    deadline = time.monotonic() + 60
    while address in Path("/proc/net/unix").read_text():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


ONE_CLIENT = """
import json, sys, time
from workers.kv_transfer.host_index import Place
from workers.kv_transfer.keeper import Keeper, KeeperConfig
from workers.kv_transfer.keeper_client import KeeperClient
fields = json.loads(sys.argv[1])
client = KeeperClient(KeeperConfig(**{**fields, "owner": tuple(fields["owner"])}))
client.layout(b"f" * 16, 1024, 0)
places = [Place(bytes([n]) * 32, b"", b"", n, 1) for n in range(5)]
units = client.reserve(places)
for n, (unit,) in enumerate(units[:3]):
    client.memory[unit * 1024] = 100 + n
client.publish({place.name: 9 for place in places[:3]})
client.find([places[0].name])
print("ready", flush=True)
time.sleep(60)
"""


def test_contents_outlive_a_killed_rank_and_its_units_come_back(keeper_config):
    import json
    from dataclasses import asdict

    rank = subprocess.Popen(
        [sys.executable, "-c", ONE_CLIENT, json.dumps(asdict(keeper_config))],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    rank.stdout.close()
    client = KeeperClient(keeper_config)
    assert client.layout(FORM, 1024, 0) == 64
    names = [bytes([n]) * 32 for n in range(5)]
    assert [name in client.hints for name in names] == [True] * 3 + [False] * 2
    found = client.find(names)
    assert [it and client.memory[it[0][0] * 1024] for it in found] == [100, 101, 102, None, None]
    client.release([names[1]])
    assert client.find([names[1]]) == [None], "it was damaged"
    assert client.counts()["damaged"] == 1
    many = client.reserve([Place(key(n), b"", b"", 0, 1) for n in range(64)])
    assert None not in many, "neither its pins nor its reservations stay"
    assert client.counts()["used_bytes"] == 2**16
    client.leave()
    client.close()
    assert ended(keeper_config)


def test_another_form_of_contents_empties_the_store(keeper_config):
    first = KeeperClient(keeper_config)
    first.layout(FORM, 1024, 0)
    places = chain("a", 2)
    first.reserve(places)
    first.publish({place.name: 1 for place in places})
    second = KeeperClient(keeper_config)
    second.layout(FORM, 1024, 0)
    assert all(second.find([place.name])[0] for place in places)
    second.layout(b"g" * 16, 2048, 0)
    assert second.find([places[0].name]) == [None] and places[0].name not in second.hints
    with pytest.raises(KeeperLostError):
        first.counts()
    second.leave()
    second.close()
    assert ended(keeper_config)


def test_a_keeper_ends_with_the_process_that_starts_ranks(keeper_config):
    owner = subprocess.Popen(["sleep", "600"])
    from dataclasses import replace

    config = replace(keeper_config, owner=(owner.pid, start_ticks(owner.pid)))
    client = KeeperClient(config)
    client.counts()
    owner.kill()
    assert ended(config), "a zombie has ended too: its parent may reap it late or never"
    owner.wait()
    with pytest.raises(KeeperLostError), suppress(TimeoutError):
        client.counts()
    client.close()
