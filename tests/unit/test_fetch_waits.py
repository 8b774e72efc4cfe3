"""Sequences that wait for a fetch from another node: what is asked for, when, and by whom. The places are fakes."""

import pytest
import torch

from tests.unit.test_prefix_cache import BLOCK, PROMPT, Server
from workers.kv_cache.block_pool import chain_keys, root_key
from workers.kv_cache.transfers import BlockTransfers
from workers.kv_transfer.connector import NOWHERE, KVConnector, KVFetcher, Transfer
from workers.kv_transfer.contents import CacheContents, Rows
from workers.step.adapter_slots import AdapterSlots
from workers.step.step_sync import StepPlan
from workers.wire.request import EngineRequest, SamplingParams

ADAPTER = 7  # the id of one that is in a slot
LONG = [number % 7 for number in range(10 * BLOCK + 1)]


class Memory(KVConnector):
    """A place that holds `names`, and gives them at once; `saved` are the transfers to it."""

    place, saves = "host", True

    def __init__(self) -> None:
        super().__init__()
        self.names: set[bytes] = set()
        self.loaded: list[Transfer] = []
        self.saved: list[Transfer] = []
        self._ended: list[Transfer] = []

    def bind(self, contents: CacheContents) -> None: ...
    def unbind(self) -> None: ...
    def close(self) -> None: ...

    def save(self, transfer: Transfer) -> None:
        self.saved.append(transfer)
        self._ended.append(transfer)

    def found(self, request: EngineRequest, keys: list[bytes]) -> set[bytes]:
        return self.names

    def load(self, transfer: Transfer) -> None:
        transfer.done = {item.name for item in transfer.items}
        self.loaded.append(transfer)

    def ended(self) -> list[Transfer]:
        found = self.loaded + self._ended
        self.loaded, self._ended = [], []
        return found


class Source(KVFetcher):
    """A fetcher of which the test ends the fetches."""

    place = "nixl"

    def __init__(self) -> None:
        super().__init__()
        self.source = "here"
        self.open: list[Transfer] = []
        self._ended: list[Transfer] = []

    def bind(self, contents: CacheContents) -> None: ...
    def close(self) -> None: ...

    def unbind(self) -> None:
        self.end()

    def fetch(self, transfer: Transfer) -> None:
        self.open.append(transfer)

    def end(self) -> None:
        self._ended, self.open = self._ended + self.open, []

    def ended(self) -> list[Transfer]:
        found, self._ended = self._ended, []
        return found

    def counts(self) -> dict[str, float]:
        return {"fetches": 3}


class Scene:
    def __init__(self, **kinds: int):
        self.server = Server(num_blocks=64, **kinds)
        self.scheduler = self.server.scheduler
        self.scheduler.adapters = AdapterSlots(1, lambda adapter: True, lambda *piece: None)
        self.scheduler.follow(StepPlan(False, (0,), adapters_wanted=(ADAPTER,)))
        self.memory, self.source = Memory(), Source()
        cache = self.scheduler.cache
        contents = CacheContents(Rows([]), Rows([]), b"", torch.device("cpu"))
        cache.transfers = BlockTransfers(
            cache.groups,
            BLOCK,
            64,
            [self.memory],
            contents,
            fetcher=self.source,
            min_gain=2 * BLOCK,
        )

    def add(self, name: str, prompt: list[int], source: str = "there", *, adapter: int = 0) -> None:
        request = EngineRequest(
            request_id=name,
            ingress_id="i",
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=1),
            kv_source=source,
            adapter=adapter,
        )
        assert self.scheduler.add(request) is None

    def schedule(self) -> list[str]:
        """The requests of the next step."""
        self.scheduler.settle()
        return [it.request.request_id for it in self.scheduler.schedule(0).seqs]


def test_a_sequence_waits_for_what_this_node_lacks_and_loads_what_came() -> None:
    now = Scene()
    now.add("a", LONG)
    assert not now.schedule() and not now.scheduler.waiting
    (transfer,) = now.source.open
    assert [item.number for item in transfer.items] == list(range(10))
    assert {item.place for item in transfer.items} == {NOWHERE} and not transfer.private
    parents = [b"", *(item.key for item in transfer.items[:-1])]
    assert [item.parent for item in transfer.items] == parents
    assert transfer.request is not None and transfer.request.kv_source == "there"
    now.memory.names = {item.name for item in transfer.items[:6]}
    now.source.end()
    assert not now.schedule(), "it waits for the load"
    (loaded,) = now.memory.loaded
    assert [item.number for item in loaded.items] == list(range(6))
    assert now.schedule() == ["a"]
    (seq,) = now.scheduler.running
    assert seq.num_cached_tokens == 6 * BLOCK
    gauges = now.scheduler.cache.gauges()
    assert gauges["kv_loads"] == 1 and gauges["kv_nixl_fetches"] == 3
    now.scheduler.check_integrity()


def test_contents_of_adapters_are_private_when_they_come() -> None:
    """Ids of adapters mean nothing to the next server, so what it may find in files has none."""
    now = Scene()
    now.add("a", LONG, adapter=ADAPTER)
    now.schedule()
    (fetch,) = now.source.open
    now.memory.names = {item.name for item in fetch.items}
    now.source.end()
    now.schedule()
    (load,) = now.memory.loaded
    assert fetch.private and load.private and len(load.items) == 10
    assert now.schedule() == ["a"]


@pytest.mark.parametrize("kinds", [{}, {"window": 2 * BLOCK}, {"snapshots": 4}])
def test_contents_of_adapters_are_private_when_they_are_saved(kinds: dict[str, int]) -> None:
    """Two requests with one prompt, computed by the same steps."""
    now = Scene(**kinds)
    now.add("adapted", LONG, "", adapter=ADAPTER)
    now.add("plain", LONG, "")
    now.server.finish()
    cache = now.scheduler.cache
    while cache.names_on_way:  # few places are held for a save at once
        cache.transfers.save(all_of_them=True)
        now.scheduler.settle()
    suffixes = {group.suffix for group in cache.groups}
    for adapter in (0, ADAPTER):
        keys = {*chain_keys(root_key("", adapter), LONG, BLOCK)}
        items = [
            it for saved in now.memory.saved if saved.private == bool(adapter) for it in saved.items
        ]
        assert {item.suffix for item in items} == suffixes, "contents of every kind"
        assert {item.key for item in items} <= keys


def test_a_fetch_that_brings_nothing_is_not_tried_again() -> None:
    now = Scene()
    now.add("a", LONG)
    assert not now.schedule()
    now.source.end()
    assert now.schedule() == ["a"] and not now.source.open
    assert now.scheduler.running[0].num_cached_tokens == 0


@pytest.mark.parametrize("why", ["no source", "short", "held by this node"])
def test_what_needs_no_fetch(why: str) -> None:
    now = Scene()
    if why == "held by this node":
        now.add("a", LONG)
        now.schedule()
        now.memory.names = {item.name for item in now.source.open[0].items}
        now.source.end()
        now.schedule()
        assert now.schedule() == ["a"]
        now.add("b", [*LONG[:-1], 6, 6, 6])
        assert now.schedule() and not now.source.open
        return
    now.add("a", PROMPT[: 2 * BLOCK] if why == "short" else LONG, "" if why == "no source" else "x")
    assert now.schedule() == ["a"] and not now.source.open


def test_equal_prompts_wait_for_one_fetch() -> None:
    now = Scene()
    now.add("a", LONG)
    now.add("b", LONG)
    assert not now.schedule() and len(now.source.open) == 1
    now.memory.names = {item.name for item in now.source.open[0].items}
    now.source.end()
    assert not now.schedule(), "one load for both"
    assert sorted(now.schedule()) == ["a", "b"] and not now.source.open
    now.scheduler.check_integrity()


def test_windows_and_states_are_asked_for_as_a_start_needs_them() -> None:
    now = Scene(window=2 * BLOCK)
    now.add("a", LONG)
    now.schedule()
    windows = [it.number for it in now.source.open[0].items if it.suffix]
    assert windows and windows == list(range(windows[0], 10)) and windows[0] >= 7
    now = Scene(snapshots=4)
    now.add("a", LONG)
    now.schedule()
    states = [it.number for it in now.source.open[0].items if it.is_state]
    assert states == list(range(10)), "the other node may hold an earlier one than the last"


def test_the_end_of_an_epoch_ends_a_fetch() -> None:
    now = Scene()
    now.add("a", LONG)
    now.schedule()
    cache = now.scheduler.cache
    assert cache.kv_source == "here" and cache.transfers.num_waiting == 1
    cache.close()
    assert cache.kv_source == "" and not now.source.open
