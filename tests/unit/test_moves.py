"""Ranks of a group fail: another group goes on with its requests, and those that may have ended the ranks stay."""

import asyncio
from typing import Any

import pytest

from cluster.client.engine_client import EngineClient
from cluster.errors import EngineDeadError
from tests.unit.client_scene import PARAMS, OfFakes, Scene, run, scene, use_two_roles
from tests.unit.ray_fakes import rank_config, until
from tests.unit.test_prefill_groups import DECODE, PREFILL, holder
from workers.wire.request import RequestOutput


@pytest.fixture(autouse=True)
def roles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_two_roles(monkeypatch)


async def hand_over(now: Scene, name: str, **options: Any) -> "tuple[asyncio.Task[None], Any]":
    """Ask for a request and hand it over. Returns the client, and the decode rank, which has sent no token."""
    asked = now.ask(name, **options)
    rank, _ = await holder(now, PREFILL, name)
    await rank.emit(name, 0, 1, finish=True)
    rank, _ = await holder(now, DECODE, f"{name}~2")
    return asked, rank


async def begin(now: Scene, rank: Any, wire_id: str) -> None:
    """Let a rank begin a request."""
    await rank.send(RequestOutput(wire_id, []))
    await until(lambda: any(wire_id in it.open and it.open[wire_id].begun for it in groups(now)))


def groups(now: Scene) -> Any:
    return now.client._groups


async def fail_decode(now: Scene) -> asyncio.Event:
    """Kill a decode rank, and return when the ingress has noticed; the event lets the group serve again."""
    begins = now.hold_rebuild(DECODE)
    await now.kill(1, DECODE)
    await until(lambda: groups(now)[DECODE].health.state == "rebuilding")
    return begins


async def serves(now: Scene, group: int) -> None:
    await until(lambda: groups(now)[group].reachable)


def test_the_prefill_group_goes_on_while_the_decode_group_is_away() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked, old = await hand_over(now, "x")
            await old.emit("x~2", 1, 1)
            await until(lambda: now.answers["x"] == [100, 101])
            begins = await fail_decode(now)
            rank, rest = await holder(now, PREFILL, "x~3")
            assert rest.emitted_token_ids == [100, 101] and rest.params == PARAMS
            assert now.outstanding[2:] == (0, 0)
            new = now.ask("y")
            first, prompt = await holder(now, PREFILL, "y")
            assert prompt.hands_over
            await first.emit("y", 0, 1, finish=True)
            first, _ = await holder(now, PREFILL, "y~2")
            await first.emit("y~2", 1, 1, finish=True)
            await new
            begins.set()
            await serves(now, DECODE)
            later, decoder = await hand_over(now, "z")
            await decoder.emit("z~2", 1, 1, finish=True)
            await later
            await rank.emit("x~3", 2, 1, finish=True)
            await asked
            assert now.answers == {"x": [100, 101, 102], "y": [100, 101], "z": [100, 101]}
            assert now.outstanding == now.outstanding_prefill == (0, 0, 0, 0)

    run(scenario())


def test_a_request_that_its_rank_has_begun_waits_for_the_judgement_of_its_group() -> None:
    """It may have ended the rank, and would end the other group next. A request that was not begun leaves."""

    async def scenario() -> None:
        async with scene() as now:
            suspect, decoder = await hand_over(now, "x")
            await begin(now, decoder, "x~2")
            waits, _ = await hand_over(now, "y")
            begins = await fail_decode(now)
            rank, rest = await holder(now, PREFILL, "y~3")
            assert rest.emitted_token_ids == [100]
            assert [*groups(now)[DECODE].open] == ["x~2"]
            begins.set()
            decoder, again = await holder(now, DECODE, "x~3")
            assert again.emitted_token_ids == [100]
            await decoder.emit("x~3", 1, 1, finish=True)
            await rank.emit("y~3", 1, 1, finish=True)
            await asyncio.gather(suspect, waits)
            assert now.answers == {"x": [100, 101], "y": [100, 101]}

    run(scenario())


def test_a_request_without_a_token_leaves_one_group_and_not_the_next() -> None:
    """The notice that a rank has begun it may be lost with the rank."""

    async def scenario() -> None:
        async with scene() as now:
            asked, _ = await hand_over(now, "x")
            begins = await fail_decode(now)
            await holder(now, PREFILL, "x~3")
            begins.set()
            await serves(now, DECODE)
            ends = now.hold_rebuild(PREFILL)
            await now.kill(1, PREFILL)
            await until(lambda: groups(now)[PREFILL].health.state == "rebuilding")
            assert [*groups(now)[PREFILL].open] == ["x~3"] and not groups(now)[DECODE].open
            ends.set()
            rank, rest = await holder(now, PREFILL, "x~4")
            assert rest.emitted_token_ids == [100]
            await rank.emit("x~4", 1, 1, finish=True)
            await asked

    run(scenario())


def test_a_request_for_one_rank_waits_for_it() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("x", rank=2)
            rank, _ = await holder(now, DECODE, "x")
            await rank.emit("x", 0, 1)
            await until(lambda: now.answers["x"] == [100])
            begins = await fail_decode(now)
            assert [*groups(now)[DECODE].open] == ["x"]
            begins.set()
            rank, _ = await holder(now, DECODE, "x~2")
            await rank.emit("x~2", 1, 1, finish=True)
            await asked

    run(scenario())


def test_requests_stay_in_a_group_that_is_changed() -> None:
    """No rank has failed: its caches stay, and the pause is that of a new epoch."""

    async def scenario() -> None:
        async with scene() as now:
            asked, decoder = await hand_over(now, "x")
            await decoder.emit("x~2", 1, 1)
            await until(lambda: now.answers["x"] == [100, 101])
            begins = now.hold_rebuild(DECODE)
            group = now.supervisor._pool.groups[DECODE]
            change = asyncio.create_task(group.change(rank_config(2), "other settings"))
            await until(lambda: groups(now)[DECODE].health.state == "rebuilding")
            assert [*groups(now)[DECODE].open] == ["x~2"]
            begins.set()
            await change
            rank, _ = await holder(now, DECODE, "x~3")
            await rank.emit("x~3", 2, 1, finish=True)
            await asked

    run(scenario())


def test_requests_leave_a_group_that_cannot_be_changed() -> None:
    """The change ends a rank, so the rebuild after it makes no change."""

    async def scenario() -> None:
        async with scene() as now:
            asked, decoder = await hand_over(now, "x")
            await decoder.emit("x~2", 1, 1)
            await until(lambda: now.answers["x"] == [100, 101])
            group = now.supervisor._pool.groups[DECODE]
            now.ranks_of(DECODE)[0].fail["run_stage"] = ValueError("no room for this setting")
            change = asyncio.create_task(group.change(rank_config(2), "other settings"))
            rank, rest = await holder(now, PREFILL, "x~3")
            assert rest.emitted_token_ids == [100, 101]
            with pytest.raises(ValueError, match="no room for this setting"):
                await change
            await rank.emit("x~3", 2, 1, finish=True)
            await asked

    run(scenario())


def test_requests_leave_a_group_that_is_not_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the group ends those that cannot leave."""
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 0, "hang_timeout_s": 0.5})

    async def scenario() -> None:
        async with scene() as now:
            asked, decoder = await hand_over(now, "x")
            await decoder.emit("x~2", 1, 1)
            suspect, decoder = await hand_over(now, "y")
            await begin(now, decoder, "y~2")
            await until(lambda: now.answers["x"] == [100, 101])
            await now.kill(1, DECODE)
            rank, rest = await holder(now, PREFILL, "x~3")
            assert rest.emitted_token_ids == [100, 101]
            with pytest.raises(EngineDeadError, match="its process died"):
                await suspect
            await rank.emit("x~3", 2, 1, finish=True)
            await asked
            assert now.client.health() == (True, "")

    run(scenario())


def test_the_group_that_serves_first_goes_on_where_both_have_failed() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked, decoder = await hand_over(now, "x")
            await decoder.emit("x~2", 1, 1)
            await until(lambda: now.answers["x"] == [100, 101])
            ends = now.hold_rebuild(PREFILL)
            await now.kill(1, PREFILL)
            await until(lambda: groups(now)[PREFILL].health.state == "rebuilding")
            await fail_decode(now)
            assert [*groups(now)[DECODE].open] == ["x~2"]
            ends.set()
            rank, rest = await holder(now, PREFILL, "x~3")
            assert rest.emitted_token_ids == [100, 101]
            await rank.emit("x~3", 2, 1, finish=True)
            await asked

    run(scenario())


def test_the_output_of_a_whole_request_has_the_tokens_of_all_groups() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked, decoder = await hand_over(now, "x", whole=True)
            await decoder.emit("x~2", 1, 1)
            await until(lambda: groups(now)[DECODE].open["x~2"].emitted == [100, 101])
            await fail_decode(now)
            rank, rest = await holder(now, PREFILL, "x~3")
            assert rest.emitted_token_ids == [100, 101] and now.answers["x"] == []
            await rank.emit("x~3", 2, 1, finish=True)
            await asked
            assert now.answers["x"] == [100, 101, 102]

    run(scenario())


def test_a_client_that_leaves_aborts_its_request_where_it_is_now() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked, decoder = await hand_over(now, "x")
            await decoder.emit("x~2", 1, 1)
            await until(lambda: now.answers["x"] == [100, 101])
            await fail_decode(now)
            rank, _ = await holder(now, PREFILL, "x~3")
            asked.cancel()
            await until(lambda: rank.aborted == ["x~3"])
            assert not any(group.open for group in groups(now))
            assert now.outstanding == now.outstanding_prefill == (0, 0, 0, 0)

    run(scenario())


def test_no_group_is_chosen_before_the_news_of_all_groups_are_noted() -> None:
    """One message of the supervisor has the failures of both groups."""

    async def scenario() -> None:
        async with scene() as now:
            asked, decoder = await hand_over(now, "x")
            await decoder.emit("x~2", 1, 1)
            await until(lambda: now.answers["x"] == [100, 101])
            client: EngineClient = now.client
            healths = [it.health._replace(state="rebuilding", epoch=1) for it in groups(now)]
            client._follow(healths)
            assert [len(group.open) for group in groups(now)] == [0, 1]
            asked.cancel()

    run(scenario())
