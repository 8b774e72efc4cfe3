"""Ends that an engine holds back until KV is in its place: they are published whatever the place does."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_engine import Alone
from workers.engine import hand_overs
from workers.kv_cache.transfers import BlockTransfers
from workers.kv_transfer.connector import KVConnector, Transfer
from workers.wire.request import EngineRequest, SamplingParams


class OtherPlace(KVConnector):
    """Ends saves as they begin, as a host tier without its keeper does, or when the test ends them."""

    place = "other"

    def __init__(self, *, at_once: bool):
        super().__init__()
        self._at_once = at_once
        self.open: list[Transfer] = []
        self._ended: list[Transfer] = []

    def bind(self, contents: Any) -> None:
        pass

    def unbind(self) -> None:
        self.end()

    def found(self, request: EngineRequest, keys: list[bytes]) -> tuple[bytes, ...]:
        return ()

    def load(self, transfer: Transfer) -> None:
        raise AssertionError("nothing is found")

    def save(self, transfer: Transfer) -> None:
        self.open.append(transfer)
        if self._at_once:
            self.end()

    def end(self) -> None:
        self._ended += self.open
        self.open.clear()
        self.on_ended()

    def ended(self) -> list[Transfer]:
        found, self._ended = self._ended, []
        return found

    def close(self) -> None:
        pass


def holding(*, at_once: bool) -> tuple[Alone, OtherPlace]:
    """An engine that has computed the prompt of "a" and holds its end back."""
    alone, place = Alone(), OtherPlace(at_once=at_once)
    cache, contents = alone.scheduler.cache, SimpleNamespace(blocks=SimpleNamespace(row_bytes=1))
    cache.transfers = BlockTransfers(
        cache.groups,
        cache.block_size,
        cache.num_blocks,
        [place],
        contents,  # type: ignore[arg-type]
    )
    cache.transfers._most_held = 1  # one block is saved after the other
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
