"""The ranks that scripts.bench.group_failures kills."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench import group_failures


class FakeRank:
    """A process of which each look finds `per_look` seconds of processor time more."""

    def __init__(self, per_look: float):
        self._per_look, self._spent = per_look, 100.0 / per_look

    def cpu_times(self) -> tuple[float, float, float]:
        self._spent += self._per_look
        return self._spent, 0.0, 7.0


@pytest.mark.parametrize("decode", [0, 1])
def test_the_decode_rank_is_the_busy_one_and_no_standby(
    monkeypatch: pytest.MonkeyPatch, decode: int
) -> None:
    ranks: list[Any] = [FakeRank(0.25), FakeRank(0.25)]
    ranks[decode] = FakeRank(2.0)
    monkeypatch.setattr(group_failures, "ranks_of", lambda pid: [*ranks, SimpleNamespace()])
    monkeypatch.setattr(group_failures, "BUSY_S", 0.0)

    def victims(killed: str) -> list[Any]:
        return asyncio.run(group_failures.victims(1, killed))

    assert victims("decode") == [ranks[decode]] and victims("prefill") == [ranks[1 - decode]]
    assert victims("both") == ranks
