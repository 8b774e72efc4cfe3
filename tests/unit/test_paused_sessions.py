"""Sessions that come back from another place, with few slots for snapshots of states: what each turn starts behind."""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.other_place import OtherPlace
from tests.unit.schedulers import make_scheduler, snapshots_of
from workers.config import FEW_SNAPSHOTS, SchedulerConfig
from workers.kv_cache import transfers
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.kv_cache.transfers import BlockTransfers
from workers.kv_transfer.connector import Transfer
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.step_output import StepOutput
from workers.wire.request import EngineRequest, SamplingParams

BLOCK = 16
ROW_BYTES = 2**20  # each block is saved at once


class SlowPlace(OtherPlace):
    """Moves so many items a step, and whole transfers: loads first."""

    def __init__(self, items_a_step: int):
        super().__init__()
        self.items_a_step = items_a_step
        self._loads, self._saves = deque[Transfer](), deque[Transfer]()

    def load(self, transfer: Transfer) -> None:
        self._loads.append(transfer)

    def save(self, transfer: Transfer) -> None:
        self._saves.append(transfer)

    def step(self) -> None:
        left = self.items_a_step
        while left > 0 and (queue := self._loads or self._saves):
            transfer = queue.popleft()
            names = {item.name for item in transfer.items}
            left -= len(names)
            if queue is self._saves:
                self.names |= names
            transfer.done = names & self.names
            self._ended.append(transfer)


class Sessions:
    """A scheduler with one step in flight, over a cache with a place beside it."""

    def __init__(
        self, place: SlowPlace, num_blocks: int, *, snapshots: int = FEW_SNAPSHOTS, **limits: int
    ):
        values = {"max_num_seqs": 32, "max_num_batched_tokens": 512, **limits}
        states = StateSnapshots(1 + values["max_num_seqs"], snapshots)
        self.scheduler = make_scheduler(
            SchedulerConfig(**values),
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=4096,
            snapshots=states,
        )
        self.place, cache = place, self.scheduler.cache
        contents: Any = SimpleNamespace(blocks=SimpleNamespace(row_bytes=ROW_BYTES))
        cache.transfers = BlockTransfers(cache.groups, BLOCK, num_blocks, [place], contents)
        self.cached: dict[str, int] = {}
        self.open: set[str] = set()
        self._in_flight: deque[ScheduledBatch] = deque()

    def add(self, name: str, prompt: list[int], max_tokens: int = 16, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        request = EngineRequest(
            request_id=name,
            ingress_id="i",
            prompt_token_ids=prompt,
            params=params,
            priority=priority,
        )
        assert self.scheduler.add(request) is None
        self.open.add(name)

    def step(self) -> None:
        batch = self.scheduler.schedule()
        if batch.seqs:
            self.scheduler.launched(batch)
            self._in_flight.append(batch)
        self.place.step()
        if len(self._in_flight) > bool(batch.seqs):
            batch = self._in_flight.popleft()
            drawn = [1] * int(batch.num_logits.sum())
            for output in self.scheduler.commit(batch, StepOutput.of(batch, drawn)).outputs():
                if output.num_cached_tokens is not None:
                    self.cached.setdefault(output.request_id, output.num_cached_tokens)
                if output.finish_reason is not None:
                    self.open.discard(output.request_id)

    def finish(self) -> None:
        for _ in range(5000):
            if not self.open:
                return
            self.step()
        raise AssertionError("a sequence waits for ever")

    def close(self) -> None:
        """Let all transfers end; nothing holds memory then."""
        self.place.items_a_step = 10**9
        for _ in range(3):
            self.scheduler.settle(idle=True)
            self.place.step()
        self.scheduler.settle()
        self.scheduler.check_integrity()
        assert self.scheduler.cache.pool.usage == 0


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1, 50_000), k=length)


@pytest.mark.parametrize("items_a_step", [10, 40, 10_000])
@pytest.mark.parametrize("snapshots", [2, FEW_SNAPSHOTS])
def test_every_turn_starts_behind_a_state_of_its_session(items_a_step: int, snapshots: int) -> None:
    """48 sessions in turns, 16 at once, over a cache for a quarter of them: 12 run at once.

    Where several prompts end in one step, two slots are too few for the states of all; the state before is found then.
    """
    length, growth, count = 1024, 128, 48
    place = SlowPlace(items_a_step)
    sessions = Sessions(place, count * length // BLOCK // 4 + 1, snapshots=snapshots)
    for turn in range(3):
        waiting = deque(range(count))
        while waiting or sessions.open:
            while waiting and len(sessions.open) < 16:
                session = waiting.popleft()
                sessions.add(f"{session} {turn}", text(session, length + growth * turn))
            sessions.step()
        before = (length + growth * (turn - 1) - 1) // BLOCK * BLOCK if turn else 0
        least = before if snapshots == FEW_SNAPSHOTS else min(before, length - BLOCK)
        found = [sessions.cached[f"{session} {turn}"] for session in range(count)]
        assert least <= min(found) and max(found) <= before
    sessions.close()


def with_saved(place: SlowPlace, num_blocks: int, names: str, **limits: int) -> Sessions:
    """Prompts of 20 blocks that were computed, saved and then replaced on the device."""
    sessions = Sessions(place, num_blocks, **limits)
    for name in names:
        sessions.add(f"{name} before", text(ord(name), 321), max_tokens=1)
        sessions.finish()
        for _ in range(10):
            sessions.scheduler.settle(idle=True)
            place.step()
    assert len(place.names) == 21 * len(names)
    keys = list(sessions.scheduler.cache.pool._block_of)
    for group in sessions.scheduler.cache.groups:
        group.forget(keys)
    return sessions


def test_a_sequence_waits_for_slots_that_transfers_hold() -> None:
    """The only slot belongs to the load of another one: to compute the prompt would take longer than to wait."""
    place = SlowPlace(10_000)
    sessions = with_saved(place, 100, "ab", snapshots=1)
    place.items_a_step = 0
    for name in "ab":
        sessions.add(name, text(ord(name), 321))
    for _ in range(5):
        sessions.step()
    assert not sessions.cached.keys() & set("ab") and sessions.scheduler.cache.transfers is not None
    assert sessions.scheduler.cache.transfers.num_waiting == 1, "the other one is the next in turn"
    assert not sessions.scheduler.has_work, "nothing changes before the load ends"
    place.items_a_step = 10_000
    sessions.finish()
    assert [sessions.cached[name] for name in "ab"] == [320, 320]
    sessions.close()


def test_saves_are_small_so_that_a_load_waits_for_little() -> None:
    place = SlowPlace(0)
    sessions = Sessions(place, 1200, max_num_batched_tokens=4096)
    sessions.add("a", text(1, 3200), max_tokens=1)
    while sessions.open:
        sessions.step()
    sizes = [len(transfer.items) for transfer in place._saves]
    assert max(sizes) == transfers.SAVE_BYTES // ROW_BYTES and sum(sizes) > 2 * max(sizes)
    sessions.close()


def test_a_loaded_prefix_gives_way_to_a_sequence_before_it() -> None:
    place = SlowPlace(10_000)
    sessions = with_saved(place, 30, "a", max_num_batched_tokens=64)
    sessions.add("busy", text(0, 8), max_tokens=2)
    sessions.step()
    sessions.add("a", text(ord("a"), 321))
    sessions.step()
    sessions.add("first", text(1, 321), priority=-1)
    sessions.finish()
    assert sessions.cached["first"] == 0 and sessions.cached["a"] in (0, 320)
    sessions.close()


def test_a_running_sequence_takes_the_memory_of_a_loaded_prefix() -> None:
    """It would be preempted otherwise, for a sequence that has not started."""
    place = SlowPlace(10_000)
    sessions = with_saved(place, 31, "a", max_num_seqs=1)
    sessions.add("busy", text(0, 8 * BLOCK), max_tokens=3 * BLOCK)
    sessions.step()
    sessions.add("a", text(ord("a"), 321), max_tokens=1)
    sessions.finish()
    assert not sessions.scheduler.num_preemptions
    sessions.close()


def test_an_aborted_sequence_lets_go_of_its_loaded_prefix() -> None:
    place = SlowPlace(10_000)
    sessions = with_saved(place, 100, "a", max_num_batched_tokens=BLOCK)
    place.items_a_step = 0
    sessions.add("a", text(ord("a"), 321))
    sessions.step()
    sessions.add("busy", text(0, 10 * BLOCK), max_tokens=2)
    place.items_a_step = 10_000
    for _ in range(4):  # the prompt of the other one takes all tokens of a step
        sessions.step()
    cache = sessions.scheduler.cache
    assert cache.transfers is not None and len(cache.transfers._arrived) == 1
    sessions.scheduler.abort("a")
    sessions.open.discard("a")
    sessions.finish()
    sessions.close()
    snapshots = snapshots_of(cache)
    assert snapshots is not None and not snapshots._held


def test_a_sequence_of_which_a_loaded_part_is_damaged_waits_for_no_other() -> None:
    """Without its state the blocks that it holds are of no use to it, and it needs their memory."""
    place = SlowPlace(10_000)
    sessions = with_saved(place, 36, "a")
    sessions.add("busy", text(0, 8), max_tokens=5 * BLOCK)
    sessions.step()
    place.items_a_step = 0
    sessions.add("a", text(ord("a"), 321), max_tokens=1)
    sessions.step()
    place.names = {name for name in place.names if not name.endswith(b"s")}
    place.items_a_step = 10_000
    while "a" in sessions.open:
        sessions.step()
    assert sessions.cached["a"] == 0 and "busy" in sessions.open
    sessions.finish()
    sessions.close()


def test_a_loaded_prefix_of_a_sequence_outside_the_queue_gives_way() -> None:
    """Its sequence, which comes first, waits for images; nothing else runs."""
    place = SlowPlace(10_000)
    sessions = with_saved(place, 26, "a")
    place.items_a_step = 0
    sessions.add("a", text(ord("a"), 321))
    sessions.step()
    place.items_a_step = 10_000
    place.step()
    sessions.scheduler.settle()
    first = sessions.scheduler.waiting.pop()
    sessions.add("b", text(ord("b"), 321))
    sessions.open.discard("a")
    sessions.finish()
    sessions.scheduler.waiting.append(first)
    sessions.open.add("a")
    sessions.finish()
    assert sessions.cached == {"a before": 0, "a": 0, "b": 0}
    sessions.close()
