"""Slots of adapters: all ranks agree on them, sequences wait for them, and no adapter waits for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.schedulers import make_scheduler
from workers.config import SchedulerConfig
from workers.scheduler.scheduler import Scheduler
from workers.step.adapter_slots import PATIENCE_STEPS, AdapterSlots
from workers.step.step_output import StepOutput
from workers.step.step_sync import PlanConfig, StepPlan, decide
from workers.step.vote import Vote
from workers.wire.request import EngineRequest, SamplingParams

PART = -1  # in a slot of which pieces are to come


class Written(AdapterSlots):
    """Slots whose contents are recorded."""

    def __init__(self, num_slots: int, num_pieces: int = 1):
        self.contents: dict[int, int] = {}
        self.pieces: list[tuple[int, int, int]] = []
        super().__init__(num_slots, lambda adapter: True, self.put, num_pieces)
        self.most = num_pieces - 1

    def put(self, slot: int, adapter: int, piece: int) -> None:
        self.pieces.append((slot, adapter, piece))
        self.contents[slot] = adapter if piece == self.most else PART


def plan(in_use: int = 0, wanted: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(False, (0,), adapter_slots=in_use, adapters_wanted=wanted)


def test_a_wanted_adapter_gets_the_slot_that_was_not_used_for_the_longest_time() -> None:
    slots = Written(2)
    assert slots.slot_of(0) == 0 and slots.slot_of(7) is None and slots.wants(7)
    slots.follow(plan(wanted=(7, 8, 7)))
    assert slots.contents == {1: 7} and slots.slot_of(8) is None and not slots.wants(8)
    slots.follow(plan())
    assert slots.contents == {1: 7, 2: 8}
    assert (slots.slot_of(7), slots.slot_of(8)) == (1, 2) and not slots.wants(7)
    slots.follow(plan(in_use=0b01))
    slots.follow(plan(wanted=(9,)))
    assert slots.contents == {1: 7, 2: 9} and slots.num_resident == 2
    slots.follow(plan(in_use=0b11, wanted=(8,)))
    assert slots.contents == {1: 7, 2: 9} and slots.wants(8)
    assert slots.gauges() == {"adapters_resident": 2, "adapter_loads": 3}


def test_a_slot_opens_behind_the_last_piece_and_goes_to_no_other_adapter_before() -> None:
    slots = Written(1, num_pieces=3)
    slots.follow(plan(wanted=(7,)))
    for number in range(1, 3):
        assert slots.slot_of(7) is None and not slots.wants(7) and slots.wants(8)
        slots.follow(plan(wanted=(8, 7)))
        assert slots.pieces[-1] == (1, 7, number)
    assert slots.slot_of(7) == 1 and slots.contents == {1: 7}
    slots.follow(plan(in_use=1, wanted=(8,)))
    slots.follow(plan(wanted=(8,)))
    assert slots.slot_of(7) is None and slots.contents == {1: PART}
    for _ in range(2):
        slots.follow(plan())
    assert slots.slot_of(8) == 1 and slots.contents == {1: 8}
    assert len(slots.pieces) == 6 and slots.num_loads == 2


def test_an_adapter_that_waits_closes_the_slot_that_came_first() -> None:
    slots = Written(2)
    slots.follow(plan(wanted=(7,)))
    slots.follow(plan(in_use=1, wanted=(8,)))
    for _ in range(PATIENCE_STEPS):
        assert slots.slot_of(7) == 1
        slots.follow(plan(in_use=0b11, wanted=(9,)))
    assert slots.slot_of(7) is None and not slots.wants(7) and slots.slot_of(8) == 2
    slots.follow(plan(in_use=0b10, wanted=(9,)))
    assert slots.contents == {1: 9, 2: 8} and slots.slot_of(9) == 1


def test_a_closed_slot_opens_when_nothing_waits_any_more() -> None:
    slots = Written(1)
    slots.follow(plan(wanted=(7,)))
    for _ in range(PATIENCE_STEPS):
        slots.follow(plan(in_use=1, wanted=(9,)))
    assert slots.slot_of(7) is None
    slots.follow(plan(in_use=1))
    assert slots.slot_of(7) == 1


class Rank:
    """A scheduler without a model, and the steps that it launched with which adapter in which slot."""

    def __init__(self, num_slots: int, max_num_seqs: int, num_pieces: int = 1):
        limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
        self.scheduler: Scheduler = make_scheduler(limits)
        self.slots = self.scheduler.adapters = Written(num_slots, num_pieces)
        self.finished: dict[str, int] = {}

    def add(self, name: str, adapter: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        request = EngineRequest(
            request_id=name,
            ingress_id="i",
            prompt_token_ids=[1, 2, 3],
            params=params,
            adapter=adapter,
        )
        assert self.scheduler.add(request) is None


def step(ranks: list[Rank], number: int) -> StepPlan:
    batches = [rank.scheduler.schedule() for rank in ranks]
    votes = [
        Vote(
            epoch=0,
            step=number,
            num_tokens=batch.num_tokens,
            has_work=rank.scheduler.has_work,
            **rank.scheduler.adapter_vote(batch),
        ).row()
        for rank, batch in zip(ranks, batches, strict=True)
    ]
    found = decide(np.stack(votes), PlanConfig(equal_tokens=False))
    for rank, batch in zip(ranks, batches, strict=True):
        rank.slots.follow(found)
        for seq in batch.seqs:
            slot = seq.adapter_slot
            assert (rank.slots.contents[slot] if slot else 0) == seq.request.adapter
            assert rank.scheduler.table.adapter_slots[seq.row] == slot
        if found.run:
            rank.scheduler.launched(batch)
            tokens = [5 for part in batch.parts if part.num_logits]
            for output in rank.scheduler.commit(batch, StepOutput.of(batch, tokens)).outputs():
                if output.finish_reason is not None:
                    rank.finished[output.request_id] = number
    assert len({tuple(sorted(rank.slots.contents.items())) for rank in ranks}) == 1
    return found


requests = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(1, 6), st.integers(0, 9)),
    max_size=24,
)


@given(
    requests=requests,
    num_slots=st.integers(1, 3),
    max_num_seqs=st.integers(1, 4),
    num_pieces=st.integers(1, 4),
)
def test_every_request_ends_with_its_own_adapter(
    requests: list[tuple[int, int, int, int]], num_slots: int, max_num_seqs: int, num_pieces: int
) -> None:
    """On two ranks, with aborts by the way; `step` checks the slot of every sequence."""
    ranks = [Rank(num_slots, max_num_seqs, num_pieces) for _ in range(2)]
    arrivals = sorted(enumerate(requests), key=lambda it: it[1][3])
    expected: dict[int, set[str]] = {0: set(), 1: set()}
    number = 0
    while arrivals or any(rank.scheduler.has_work for rank in ranks):
        while arrivals and arrivals[0][1][3] <= number:
            index, (rank, adapter, max_tokens, _) = arrivals.pop(0)
            ranks[rank].add(f"r{index}", adapter, max_tokens)
            if index % 5 == 4:
                ranks[rank].scheduler.abort(f"r{index}")
            else:
                expected[rank].add(f"r{index}")
        step(ranks, number)
        number += 1
        assert number < 1000
    assert [set(rank.finished) for rank in ranks] == [expected[0], expected[1]]
    last = step(ranks, number)
    assert last.sleeps and not last.adapter_slots


def test_an_adapter_gets_its_turn_under_traffic_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot, and a sequence of its adapter begins in each step on the other rank."""
    monkeypatch.setattr("workers.step.adapter_slots.PATIENCE_STEPS", 20)
    ranks = [Rank(1, 4) for _ in range(2)]
    for number in range(100):
        ranks[0].add(f"a{number}", 1, 3)
        if number == 5:
            ranks[1].add("b", 2, 2)
        step(ranks, number)
    assert 20 < ranks[1].finished["b"] < 40
    assert len(ranks[0].finished) > 60


def test_a_closed_slot_holds_back_no_request_of_a_group_without_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for the slot and what runs in it are aborted together, as with one client's connection."""
    monkeypatch.setattr("workers.step.adapter_slots.PATIENCE_STEPS", 3)
    rank = Rank(1, 4)
    rank.add("runs", 1, 20)
    for number in range(6):
        step([rank], number)
        if number == 1:
            rank.add("waits", 2, 20)
    rank.add("held back", 1, 2)
    step([rank], 6)
    assert rank.slots.slot_of(1) is None
    rank.scheduler.abort("runs")
    rank.scheduler.abort("waits")
    for number in range(7, 10):
        assert not step([rank], number).sleeps
    assert rank.finished == {"held back": 9} and not rank.scheduler.has_work


def test_requests_of_unknown_adapters_are_refused() -> None:
    scheduler = make_scheduler()
    request = EngineRequest(
        request_id="r",
        ingress_id="i",
        prompt_token_ids=[1],
        params=SamplingParams(max_tokens=1),
        adapter=3,
    )
    assert "not loaded on this rank" in (scheduler.add(request) or "")
    slots = scheduler.adapters = Written(1)
    assert scheduler.add(request) is None
    slots.is_loaded = lambda adapter: False
    assert "not loaded on this rank" in (scheduler.add(request) or "")
