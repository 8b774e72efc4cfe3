"""A pool of a prefill and a decode group: the way of a request, and every end of the prefill side."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.client import request_run
from cluster.errors import EngineDeadError
from tests.unit.client_scene import PARAMS, Scene, run, scene, use_two_roles
from tests.unit.ray_fakes import until
from workers.wire.request import EngineRequest, RequestOutput, RequestTimes

PREFILL, DECODE = 0, 1


@pytest.fixture(autouse=True)
def roles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_two_roles(monkeypatch)


async def holder(now: Scene, group: int, name: str) -> tuple[Any, EngineRequest]:
    """The rank of a group that has a request, and the request there."""
    await until(lambda: any(name in rank.requests for rank in now.ranks_of(group)))
    (rank,) = (rank for rank in now.ranks_of(group) if name in rank.requests)
    return rank, rank.requests[name]


def seen(now: Scene) -> list[str]:
    places: list[str] = []
    now.client.count_prompt = places.append
    return places


def test_a_prompt_is_computed_apart_and_the_decode_group_goes_on_behind_the_first_token() -> None:
    async def scenario() -> None:
        async with scene() as now:
            places = seen(now)
            asked = now.ask("x", priority=3, cache_salt="s")
            rank, prompt = await holder(now, PREFILL, "x")
            assert prompt.params == replace(PARAMS, max_tokens=1) and prompt.hands_over
            assert (prompt.priority, prompt.cache_salt) == (3, "s")
            assert not any(rank.requests for rank in now.ranks_of(DECODE))
            await rank.emit("x", 0, 1, finish=True)
            rank, rest = await holder(now, DECODE, "x~2")
            assert now.answers["x"] == [100], "the first token does not wait for the decode group"
            assert rest.params == PARAMS and rest.emitted_token_ids == [100]
            assert not rest.hands_over
            assert (rest.priority, rest.cache_salt) == (3, "s")
            await rank.emit("x~2", 1, 2, finish=True)
            await asked
            assert now.answers["x"] == [100, 101, 102] and places == ["prefill"]
            assert now.outstanding == now.outstanding_prefill == (0, 0, 0, 0)

    run(scenario())


def test_the_first_token_comes_before_the_hand_over_and_the_decode_group_after_it() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("x")
            rank, _ = await holder(now, PREFILL, "x")
            await rank.emit("x", 0, 1)
            await until(lambda: now.answers["x"] == [100])
            assert not any(rank.requests for rank in now.ranks_of(DECODE))
            await rank.send(RequestOutput("x", [], "length", kv_source="tcp://p key"))
            rank, rest = await holder(now, DECODE, "x~2")
            assert rest.emitted_token_ids == [100]
            assert rest.kv_source == "tcp://p key", "where the decode rank finds the KV"
            await rank.emit("x~2", 1, 1, finish=True)
            await asked
            assert now.answers["x"] == [100, 101]

    run(scenario())


def test_a_prefill_group_that_ends_in_the_middle_of_a_hand_over() -> None:
    async def scenario() -> None:
        async with scene() as now:
            places = seen(now)
            asked = now.ask("x")
            rank, _ = await holder(now, PREFILL, "x")
            await rank.emit("x", 0, 1)
            await until(lambda: now.answers["x"] == [100])
            await now.kill(1, PREFILL)
            rank, rest = await holder(now, DECODE, "x~2")
            assert rest.emitted_token_ids == [100], "no token is drawn twice"
            assert not rest.kv_source, "nothing was handed over"
            await rank.emit("x~2", 1, 1, finish=True)
            await asked
            assert now.answers["x"] == [100, 101] and places == ["decode after a failed prefill"]

    run(scenario())


def test_a_stream_that_is_lost_in_the_middle_of_a_hand_over() -> None:
    """The prompt's rank has sent the only token and holds the end back: no rank takes the request once more."""

    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("x")
            rank, _ = await holder(now, PREFILL, "x")
            await rank.emit("x", 0, 1)
            await until(lambda: now.answers["x"] == [100])
            now.expire_leases()
            both = [*now.ranks_of(PREFILL), *now.ranks_of(DECODE)]
            await until(lambda: any("x~2" in rank.requests for rank in both))
            assert not any("x~2" in rank.requests for rank in now.ranks_of(PREFILL))
            rank, rest = await holder(now, DECODE, "x~2")
            assert rest.params == PARAMS and rest.emitted_token_ids == [100]
            await rank.emit("x~2", 1, 1, finish=True)
            await asked
            assert now.answers["x"] == [100, 101]
            assert now.outstanding == now.outstanding_prefill == (0, 0, 0, 0)

    run(scenario())


@pytest.mark.parametrize("whole", [False, True])
def test_a_prefill_group_that_ends_before_its_token_is_read(whole) -> None:
    """The token and the end of the group come in one turn of the event loop."""

    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("x", whole=whole)
            await holder(now, PREFILL, "x")
            now.client._groups[PREFILL].open["x"].put(RequestOutput("x", [100]))
            now.client._groups[PREFILL].fail_requests("the prefill group is rebuilding")
            rank, rest = await holder(now, DECODE, "x~2")
            first = len(rest.emitted_token_ids)
            await rank.emit("x~2", first, 3 - first, finish=True)
            await asked
            assert now.answers["x"] == [100, 101, 102]

    run(scenario())


def test_both_groups_end_in_the_middle_of_a_prompt() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("x")
            await holder(now, PREFILL, "x")
            for group in (DECODE, PREFILL):
                now.ranks_of(group)[0].fail["run_stage"] = ValueError("the weights are gone")
            await now.kill(1, DECODE)
            await until(lambda: now.client._groups[DECODE].health.ended)
            assert not asked.done()
            await now.kill(1, PREFILL)
            with pytest.raises(EngineDeadError, match="weights are gone"):
                await asked

    run(scenario())


def test_a_request_that_its_first_token_ends_sees_no_decode_group() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("x")
            rank, _ = await holder(now, PREFILL, "x")
            await rank.send(RequestOutput("x", [7], "stop"))
            await asked
            outputs = now.client.generate("y", [1, 2, 9], replace(PARAMS, max_tokens=1))
            short = asyncio.ensure_future(anext(outputs))
            rank, only = await holder(now, PREFILL, "y")
            assert not only.hands_over
            await rank.emit("y", 0, 1, finish=True)
            assert (await short).finish_reason == "length"
            await outputs.aclose()
            assert now.answers["x"] == [7]
            assert not any(rank.requests for rank in now.ranks_of(DECODE))

    run(scenario())


def test_the_output_of_a_whole_request_is_one_with_the_times_of_both_sides() -> None:
    async def scenario() -> None:
        async with scene() as now:
            outputs = now.client.generate("x", [1, 2, 9], PARAMS, whole=True)
            asked = asyncio.ensure_future(anext(outputs))
            rank, _ = await holder(now, PREFILL, "x")
            times = RequestTimes(1.0, 2.0, 0.0)
            await rank.send(RequestOutput("x", [100], "length", num_cached_tokens=16, times=times))
            rank, _ = await holder(now, DECODE, "x~2")
            times = RequestTimes(0.25, 0.5, 4.0)
            await rank.send(RequestOutput("x~2", [101], "stop", num_cached_tokens=99, times=times))
            found = await asked
            assert found.token_ids == [100, 101] and found.finish_reason == "stop"
            assert found.num_cached_tokens == 16 and found.times == RequestTimes(1.0, 2.0, 4.75)
            await outputs.aclose()

    run(scenario())


def test_while_the_prefill_group_rebuilds_the_decode_group_computes_prompts() -> None:
    async def scenario() -> None:
        async with scene() as now:
            places = seen(now)
            begun = now.ask("x")
            await holder(now, PREFILL, "x")
            now.hold_rebuild(PREFILL)
            await now.kill(1, PREFILL)
            rank, whole = await holder(now, DECODE, "x~2")
            assert whole.emitted_token_ids == [] and whole.params == PARAMS
            new = now.ask("y")
            other, _ = await holder(now, DECODE, "y")
            await rank.emit("x~2", 0, 1, finish=True)
            await other.emit("y", 0, 1, finish=True)
            await asyncio.gather(begun, new)
            assert places == ["decode after a failed prefill"]
            assert now.outstanding[2:] == (0, 0)

    run(scenario())


def test_a_prefill_group_that_has_failed_and_one_that_serves_again() -> None:
    async def scenario() -> None:
        async with scene() as now:
            places = seen(now)
            await now.kill(1, PREFILL)
            await until(lambda: now.client._groups[PREFILL].health.epoch == 1)
            await until(lambda: now.client._groups[PREFILL].reachable)
            asked = now.ask("x")
            rank, _ = await holder(now, PREFILL, "x")
            await rank.emit("x", 0, 1, finish=True)
            rank, _ = await holder(now, DECODE, "x~2")
            await rank.emit("x~2", 1, 1, finish=True)
            await asked
            now.ranks_of(PREFILL)[0].fail["run_stage"] = ValueError("the weights are gone")
            await now.kill(1, PREFILL)
            await until(lambda: now.client._groups[PREFILL].health.ended)
            alone = now.ask("y")
            rank, _ = await holder(now, DECODE, "y")
            await rank.emit("y", 0, 1, finish=True)
            await alone
            assert places == ["prefill"] and now.client.health() == (True, "")

    run(scenario())


def test_a_decode_group_that_rebuilds_alone_goes_on_with_all_tokens_of_both_sides() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("x")
            rank, _ = await holder(now, PREFILL, "x")
            await rank.emit("x", 0, 1, finish=True)
            rank, _ = await holder(now, DECODE, "x~2")
            await rank.emit("x~2", 1, 1)
            await until(lambda: now.answers["x"] == [100, 101])
            now.ranks_of(PREFILL)[0].fail["run_stage"] = ValueError("the weights are gone")
            await now.kill(1, PREFILL)
            await until(lambda: now.client._groups[PREFILL].health.ended)
            await now.kill(1 - rank.rank, DECODE)
            rank, again = await holder(now, DECODE, "x~3")
            assert again.emitted_token_ids == [100, 101]
            await rank.emit("x~3", 2, 1, finish=True)
            await asked
            assert now.answers["x"] == [100, 101, 102]

    run(scenario())


def test_without_a_decode_group_the_prefill_group_answers() -> None:
    async def scenario() -> None:
        async with scene() as now:
            now.ranks_of(DECODE)[0].fail["run_stage"] = ValueError("the weights are gone")
            await now.kill(1, DECODE)
            await until(lambda: now.client._groups[DECODE].health.ended)
            asked = now.ask("x")
            rank, _ = await holder(now, PREFILL, "x")
            await rank.emit("x", 0, 1, finish=True)
            rank, rest = await holder(now, PREFILL, "x~2")
            assert rest.emitted_token_ids == [100]
            await rank.emit("x~2", 1, 1, finish=True)
            await asked
            assert now.answers["x"] == [100, 101]

    run(scenario())


def test_a_client_that_leaves_aborts_its_prompt() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("x")
            rank, _ = await holder(now, PREFILL, "x")
            asked.cancel()
            await until(lambda: rank.aborted == ["x"])
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert now.outstanding == now.outstanding_prefill == (0, 0, 0, 0)

    run(scenario())


def test_short_prompts_and_requests_for_one_rank_stay_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_run, "LOCAL_TOKENS", 3)

    async def scenario() -> None:
        async with scene() as now:
            places = seen(now)
            short, pinned = now.ask("x"), now.ask("y", rank=0)
            rank, request = await holder(now, DECODE, "x")
            other, whole = await holder(now, PREFILL, "y")
            assert request.params == whole.params == PARAMS
            await rank.emit("x", 0, 1, finish=True)
            await other.emit("y", 0, 1, finish=True)
            await asyncio.gather(short, pinned)
            assert places == ["decode"]

    run(scenario())


def test_an_error_of_the_prompt_is_that_of_the_request() -> None:
    async def scenario() -> None:
        async with scene() as now:
            outputs = now.client.generate("x", [1, 2, 9], PARAMS)
            asked = asyncio.ensure_future(anext(outputs))
            rank, _ = await holder(now, PREFILL, "x")
            await rank.send(RequestOutput("x", [], "error", "logits are NaN"))
            assert (await asked).error == "logits are NaN"
            with pytest.raises(StopAsyncIteration):
                await anext(outputs)

    run(scenario())


def test_a_drain_needs_a_group_that_answers() -> None:
    async def scenario() -> None:
        async with scene() as now:
            with pytest.raises(ValueError, match="no other group answers than 'd'"):
                await now.supervisor.drain(1.0, "d")
            await now.supervisor.drain(1.0, "p")
            await until(lambda: now.client._groups[PREFILL].health.ended)
            asked = now.ask("x")
            rank, _ = await holder(now, DECODE, "x")
            await rank.emit("x", 0, 1, finish=True)
            await asked

    run(scenario())


def test_a_pool_that_is_gone_refuses() -> None:
    async def scenario() -> None:
        async with scene() as now:
            for group in (DECODE, PREFILL):
                now.ranks_of(group)[0].fail["run_stage"] = ValueError("the weights are gone")
                await now.kill(1, group)
            await until(lambda: not now.client.health()[0])
            with pytest.raises(EngineDeadError, match="the weights are gone"):
                await now.ask("x")

    run(scenario())
