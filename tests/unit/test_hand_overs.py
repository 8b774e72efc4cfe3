"""Transfers between an engine and another place: no end waits for ever, and nothing forgotten comes back."""

import threading

import pytest

from tests.unit.other_place import OtherPlace, transfers_to
from tests.unit.schedulers import make_scheduler
from tests.unit.test_engine import Alone
from workers.config import SchedulerConfig
from workers.engine import hand_overs
from workers.kv_cache.block_pool import chain_keys, root_key
from workers.step.step_output import StepOutput
from workers.wire.request import EngineRequest, SamplingParams


def holding(*, at_once: bool) -> tuple[Alone, OtherPlace]:
    """An engine that has computed the prompt of "a" and holds its end back."""
    alone, place = Alone(), OtherPlace(at_once=at_once)
    transfers = transfers_to(place, alone.scheduler.cache)
    transfers._most_held = 1  # one block is saved after the other
    place.on_ended = lambda: alone.engine.wake(-1)
    params = SamplingParams(max_tokens=1)
    alone.engine.submit(
        EngineRequest(
            request_id="a",
            ingress_id="i",
            prompt_token_ids=[1] * 17,
            params=params,
            hands_over=True,
        )
    )
    alone.engine.step()
    assert [tokens for _, _, tokens, _ in alone.sent] == [[17]]
    return alone, place


def test_saves_that_end_at_once_hold_no_end_of_a_rank_that_falls_asleep() -> None:
    alone, _ = holding(at_once=True)
    assert not alone.engine._must_vote()
    assert [tokens for _, _, tokens, _ in alone.sent] == [[17], []]
    assert not alone.scheduler.cache.names_on_way
    alone.scheduler.check_integrity()


def test_a_place_that_does_not_answer_delays_an_end_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hand_overs, "HOLD_S", 0.01)
    alone, place = holding(at_once=False)
    watchdog = threading.Timer(20, alone.engine.stop)
    watchdog.start()
    alone.engine._sleep()
    watchdog.cancel()
    plan = alone.engine.step()
    assert not plan.stop, "the rank sleeps until something else wakes it"
    assert [tokens for _, _, tokens, _ in alone.sent] == [[17], []] and place.open


def test_an_end_is_not_that_of_a_later_request_with_its_id() -> None:
    alone, place = holding(at_once=False)
    alone.engine.abort("a")
    alone.submit("a", max_tokens=20)
    for _ in range(22):
        alone.engine.step()
        place.end()
    assert [tokens for _, _, tokens, _ in alone.sent] == [[17], *([n] for n in range(2, 22))]
    assert "a" not in alone.engine.open_requests


def test_contents_that_are_forgotten_while_they_are_loaded_are_not_used() -> None:
    alone, place = Alone(), OtherPlace()
    alone.submit("first", prompt_tokens=33, max_tokens=1)
    alone.engine.step()
    cache = alone.scheduler.cache
    keys = list(cache.pool._block_of)
    cache.pool.forget(keys)
    place.names.update(keys)
    transfers = transfers_to(place, cache)
    alone.submit("a", prompt_tokens=33, max_tokens=1)
    alone.engine.step()
    assert transfers.num_waiting == 1 and len(place.open[0].items) == 8
    transfers.forget([keys[5]])
    assert not transfers.comes(keys[5]) and transfers.comes(keys[4])
    place.end()
    alone.engine.step()
    assert [name for _, name, tokens, _ in alone.sent if tokens] == ["first", "a"]
    assert cache.num_hits == 5 * cache.block_size
    assert not transfers.num_waiting and not any(map(transfers.comes, keys))


@pytest.mark.parametrize("num_blocks", range(42, 50))
def test_a_load_without_room_leaves_the_prefix_that_was_found(num_blocks: int) -> None:
    """Some blocks of the prefix's window are held by another sequence, some by none; a load takes any free block."""
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)
    sizes = {"num_blocks": num_blocks, "max_model_len": 128, "window": 32}
    scheduler = make_scheduler(limits, **sizes)
    prefix = [n % 5 for n in range(40)]

    def step() -> None:
        batch = scheduler.schedule()
        scheduler.launched(batch)
        scheduler.commit(batch, StepOutput.of(batch, [7] * len(batch.logits_seqs)))

    def add(name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        assert not scheduler.add(
            EngineRequest(request_id=name, ingress_id="i", prompt_token_ids=prompt, params=params)
        )

    add("runs", [*prefix, 1], 20)
    for _ in range(18):
        step()
    longer, place = [*prefix, *[3] * 60, 1], OtherPlace()
    keys = chain_keys(root_key(""), longer, scheduler.cache.block_size)
    place.names = {key + suffix for key in keys for suffix in (b"", b"w")}
    transfers_to(place, scheduler.cache)
    add("longer", longer, 1)
    step()
    place.end()
    while scheduler.has_work:
        step()
        place.end()
    scheduler.check_integrity()
