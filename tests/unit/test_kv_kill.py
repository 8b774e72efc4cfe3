"""The pauses that scripts.bench.kv_kill counts, when it kills, and the ratios of them in scripts.bench.kv_tier."""

import asyncio
from typing import Any

import pytest

from scripts.bench.kv_kill import FIRST_TOKENS, flowing, pause, summary
from scripts.bench.kv_streams import Stream
from scripts.bench.kv_tier import compare


def test_a_pause_begins_at_the_failure_or_at_a_token_behind_it() -> None:
    assert pause(Stream(times=[1.0, 2.0, 9.0, 9.5]), 4.0) == 5.0
    late = Stream(times=[1.0, 4.1, 12.0, 12.5])
    assert pause(late, 4.0) == pytest.approx(7.9), "a token that was on its way does not end it"


def test_a_summary_has_the_99th_percentile_and_no_figure_of_nothing() -> None:
    found = summary([float(number) for number in range(200)])
    assert found == {
        "streams": 200,
        "pause_p50_s": 99.5,
        "pause_p99_s": 198.0,
        "pause_max_s": 199.0,
    }
    assert summary([]) == {"streams": 0}


def test_the_failure_waits_for_the_last_stream_and_refuses_a_complete_one() -> None:
    async def scenario() -> None:
        streams = [Stream(tokens=[1] * FIRST_TOKENS), Stream(tokens=[1])]
        asked: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(flowing(streams, asked))
        await asyncio.sleep(0)
        assert not waiting.done()
        streams[1].tokens += [1] * FIRST_TOKENS
        await waiting
        streams[0].complete = True
        with pytest.raises(AssertionError, match="1 answers are complete before the failure"):
            await flowing(streams, asked)
        streams[1].tokens.clear()
        asked.set_exception(ConnectionError("the server is gone"))
        with pytest.raises(ConnectionError):
            await flowing(streams, asked)

    asyncio.run(scenario())


def test_the_ratios_of_a_failure_and_the_answers_that_are_equal() -> None:
    def server(pause_s: float, behind_s: float, answers: list[list[int]]) -> dict[str, Any]:
        parts = {"killed_rank": pause_s, "killed_rank_behind_rebuild": behind_s}
        figures = {name: {"pause_p50_s": seconds} for name, seconds in parts.items()}
        return {"kill": {**figures, "answers": answers}}

    found = compare(server(10.0, 1.0, [[1], [2]]), server(15.0, 6.0, [[1], [3]]), 1e9)
    assert found == {
        "equal_answers": {"kill": "1 of 2"},
        "killed_rank_pause_p50": 1.5,
        "killed_rank_behind_rebuild_pause_p50": 6.0,
    }
