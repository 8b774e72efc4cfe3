"""The engine client finds the requests that end ranks, and no other request suffers for them."""

import asyncio
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError

from cluster.client.refusals import REFUSE_S, Refusals, request_digest
from cluster.errors import EngineDeadError, PoisonRequestError, ServingError
from cluster.supervisor.attempts import Attempts
from cluster.supervisor.status import GroupHealth
from tests.unit.client_scene import PARAMS, OfFakes, Scene, run, scene, use_fakes
from tests.unit.ray_fakes import until
from workers.rank.step_loop import RankFailedError


@pytest.fixture(autouse=True)
def rebuilding(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 5, "hang_timeout_s": 0.5})


async def begin(now: Scene, rank: int, *names: str) -> None:
    """The rank begins requests, and the client knows it."""
    for name in names:
        await reaches(now, rank, name)
        await now.ranks[rank].emit(name, 0, 0)
        await until(lambda name=name: now.group.open[name].begun)


async def serve(now: Scene, rank: int, name: str, *, finish: bool = False) -> None:
    """The rank sends the next token of a request, and the client has it."""
    short = name.split("~")[0]
    have = len(now.answers[short])
    await reaches(now, rank, name)
    await now.ranks[rank].emit(name, have, 1, finish=finish)
    await until(lambda: len(now.answers[short]) == have + 1)


def on_trial(now: Scene, rank: int) -> set[str]:
    requests = now.ranks[rank].requests.copy()
    return {name for name, request in requests.items() if request.on_trial}


async def reaches(now: Scene, rank: int, *names: str) -> None:
    await until(lambda: set(names) <= set(now.ranks[rank].requests))


async def set_aside(asked: "asyncio.Task[None]") -> None:
    with pytest.raises(PoisonRequestError, match="set aside") as caught:
        await asked
    assert (caught.value.status, caught.value.code) == (500, "request_ended_ranks")
    assert caught.value.should_retry is False


async def fail_step(now: Scene, rank: int) -> None:
    """The step loop of a rank ends with an error; its process lives."""
    calls = now.ranks[rank].calls
    await until(lambda: len(calls["done"]) == len(calls["start"]))
    now.ranks[rank].ended.set_exception(RankFailedError("KeyError: 7"))


@pytest.mark.parametrize("end", [Scene.kill, fail_step], ids=["death", "error"])
def test_a_request_that_ends_its_rank_in_three_trials_is_set_aside(end):
    """Requests with a token, requests that were not begun, and those of another rank go on without a trial."""

    async def scenario() -> None:
        async with scene() as now:
            poison, works, waits = (now.ask(name, rank=1) for name in "abw")
            other = now.ask("c", rank=0)
            await begin(now, 0, "c")
            await begin(now, 1, "a", "b")
            await serve(now, 1, "b")
            await reaches(now, 1, "w")
            await end(now, 1)
            await reaches(now, 1, "a~2", "b~2", "w~2")
            assert on_trial(now, 1) == {"a~2"} and not on_trial(now, 0)
            assert next(iter(now.ranks[1].requests)) == "a~2", "trials come first"
            await begin(now, 1, "a~2")
            await end(now, 1)
            await reaches(now, 1, "a~3", "b~3", "w~3")
            assert on_trial(now, 1) == {"a~3"}
            assert list(now.ranks[1].requests)[-1] == "a~3", "all others go first now"
            await serve(now, 1, "w~3")
            await begin(now, 1, "a~3")
            await end(now, 1)
            await begin(now, 1, "a~4")
            await end(now, 1)
            await set_aside(poison)
            await reaches(now, 0, "c~5")
            await reaches(now, 1, "b~5", "w~5")
            assert "a~5" not in now.ranks[1].requests
            for rank, name in ((1, "b~5"), (1, "w~5"), (0, "c~5")):
                await serve(now, rank, name, finish=True)
            await asyncio.gather(works, waits, other)
            assert now.answers == {"a": [], "b": [100, 101], "w": [100, 101], "c": [100]}
            assert now.outstanding == (0, 0)

    run(scenario())


def test_a_token_clears_a_request_on_trial():
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=1)
            await begin(now, 1, "a")
            await now.kill(1)
            await begin(now, 1, "a~2")
            await now.kill(1)
            await begin(now, 1, "a~3")
            await serve(now, 1, "a~3")
            request = now.group.open["a~3"]
            assert not (request.on_trial or request.failures or request.trial_failures)
            await now.kill(1)
            await begin(now, 1, "a~4")
            assert not on_trial(now, 1)
            await serve(now, 1, "a~4", finish=True)
            await asked

    run(scenario())


def test_a_request_that_ends_its_rank_at_once_is_found_without_notices():
    """The notice that a request begins may be lost with the process. A trial waits for its notice to be sent."""

    async def scenario() -> None:
        async with scene() as now:
            poison = now.ask("a", rank=1)
            for attempt in ("", "~2", "~3"):
                await reaches(now, 1, f"a{attempt}")
                assert not on_trial(now, 1)
                await now.kill(1)
            for attempt in ("~4", "~5", "~6"):
                await reaches(now, 1, f"a{attempt}")
                assert on_trial(now, 1) == {f"a{attempt}"}
                await begin(now, 1, f"a{attempt}")
                await now.kill(1)
            await set_aside(poison)

    run(scenario())


def test_failures_with_a_known_cause_do_not_end_the_group():
    """Two requests that end ranks cause more failures than `rebuild_attempts`; others are served in between."""

    async def scenario() -> None:
        async with scene() as now:
            first, second, other = (now.ask(name, rank=1) for name in "abc")
            await begin(now, 1, "a", "b", "c")
            await serve(now, 1, "c")
            await now.kill(1)
            for name, attempt in (("a", 2), ("b", 3), ("a", 4), ("b", 5), ("a", 6), ("b", 7)):
                await reaches(now, 1, f"c~{attempt}")
                if attempt > 3:
                    await serve(now, 1, f"c~{attempt}")
                await begin(now, 1, f"{name}~{attempt}")
                await now.kill(1)
            await set_aside(first)
            await set_aside(second)
            for attempt in (8, 9, 10, 11):
                await reaches(now, 1, f"c~{attempt}")
                await now.kill(1)
            await serve(now, 1, "c~12", finish=True)
            await other

    run(scenario())


def test_a_rank_that_fails_at_each_request_ends_the_group():
    """It is broken itself: excuses have a limit while it serves no request."""

    async def scenario() -> None:
        async with scene() as now:
            asked = [now.ask(name, rank=1) for name in "abcdefgh"]
            await reaches(now, 1, *"abcdefgh")
            await begin(now, 1, *"abcdefgh")
            failures = 0
            while not now.group.health.ended:
                await now.kill(1)
                failures += 1
                rank, old = now.ranks[1], now.group.epoch
                await until(
                    lambda rank=rank, old=old: (
                        now.group.health.ended or (now.group.reachable and now.group.epoch > old)
                    )
                )
                if now.group.health.ended:
                    break
                tried = [n for n, r in now.group.open.items() if r.on_trial]
                await begin(now, 1, tried[0])
                assert failures < 30
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(error, ServingError) for error in found)
            assert sum(isinstance(error, EngineDeadError) for error in found) >= 4

    run(scenario())


def test_two_ranks_that_die_at_once_are_judged_apart():
    async def scenario() -> None:
        async with scene() as now:
            asked = [now.ask("a", rank=0), now.ask("b", rank=1)]
            await begin(now, 0, "a")
            await reaches(now, 1, "b")
            await until(lambda: bool(now.ranks[0].calls["done"]))
            now.supervisor.launcher.handles[0].dead = True
            await now.kill(1)
            now.ranks[0].ended.set_exception(ActorDiedError())
            await reaches(now, 0, "a~2")
            await reaches(now, 1, "b~2")
            assert on_trial(now, 0) == {"a~2"} and not on_trial(now, 1)
            await serve(now, 0, "a~2", finish=True)
            await serve(now, 1, "b~2", finish=True)
            await asyncio.gather(*asked)

    run(scenario())


def test_a_request_that_ended_ranks_is_refused_when_its_client_sends_it_again():
    """Also by retries of one body, which would end ranks each time, and then the server."""

    async def scenario() -> None:
        async with scene() as now:
            poison = now.ask("a", rank=1)
            copy = asyncio.create_task(
                anext(now.client.generate("copy", [1, 2, 1], PARAMS, rank=0))
            )
            for attempt in ("a", "a~2", "a~3", "a~4"):
                await begin(now, 1, attempt)
                await now.kill(1)
            await set_aside(poison)
            await set_aside(copy)
            epoch = now.group.epoch
            for attempt in range(3):
                again = replace(PARAMS, seed=attempt)  # which the server draws anew
                with pytest.raises(PoisonRequestError):
                    await anext(now.client.generate(f"b{attempt}", [1, 2, 1], again))
            longer = now.client.generate("c", [1, 2, 1], replace(PARAMS, max_tokens=9), rank=0)
            other = asyncio.create_task(anext(longer))
            await now.ranks[0].emit("c", 0, 1, finish=True)
            assert (await other).token_ids == [100] and now.group.epoch == epoch == 4
            await longer.aclose()
            assert now.outstanding == (0, 0)

    run(scenario())


@pytest.mark.parametrize("end", [Scene.kill, fail_step], ids=["death", "error"])
def test_clients_that_send_one_poison_at_once_cost_one_rebuild_attempt(monkeypatch, end):
    """Four clients on both ranks, each with two retries: four rebuilds and no more, other requests go on."""

    async def client(now: Scene, name: str, rank: int) -> int:
        """Send the poison with retries; return the number of attempts."""
        for attempt in range(3):
            try:
                await anext(now.client.generate(f"{name}.{attempt}", [6, 6, 6], PARAMS, rank=rank))
            except PoisonRequestError as error:
                if not error.should_retry:
                    return attempt + 1
        raise AssertionError("the poison was not found")

    async def scenario() -> None:
        async with scene() as now:
            other = now.ask("x", rank=0)
            await serve(now, 0, "x")
            clients = [
                asyncio.create_task(client(now, name, rank))
                for name, rank in (("a", 0), ("b", 1), ("c", 0), ("d", 1))
            ]
            for epoch, attempt in enumerate(("", "~2", "~3", "~4")):
                await begin(now, 0, f"a.0{attempt}")
                await begin(now, 1, f"b.0{attempt}")
                await end(now, epoch % 2)  # each time another rank is the first to fail
                await until(lambda epoch=epoch: now.group.epoch > epoch)
            assert await asyncio.gather(*clients) == [1, 1, 1, 1]
            await serve(now, 0, "x~5", finish=True)
            await other
            assert now.supervisor._pool.groups[0].health == GroupHealth("serving", 4, "")

    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 1, "hang_timeout_s": 0.5})
    run(scenario())


def test_a_rank_that_fails_before_a_trial_begins_fails_by_itself(monkeypatch):
    """Such failures count, although a request was on trial in the rank: each when the next epoch serves."""

    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=1)
            await begin(now, 1, "a")
            await now.kill(1)
            for attempt in ("~2", "~3", "~4"):
                await reaches(now, 1, f"a{attempt}")
                assert on_trial(now, 1)
                await now.kill(1)
            with pytest.raises(EngineDeadError, match="after 2 rebuilds in a row"):
                await asked

    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 2, "hang_timeout_s": 0.5})
    run(scenario())


def test_the_verdict_of_one_ingress_holds_for_the_failures_that_two_expected():
    for verdicts in ([False, True], [True, False]):
        subject = Attempts(1)
        subject.fail(0, {1})
        subject.expect(1, {0})
        subject.expect(1, {1})
        for _ in range(3):
            subject.fail(1, {1})
            assert subject.left
            for by_request in verdicts:
                subject.judge(by_request)
        subject.fail(2, {1})
        assert subject.left, "the trials were of the epoch before"
        subject.fail(2, {1})
        assert subject.used_up


def test_a_digest_is_refused_for_a_time():
    now = 0.0
    subject = Refusals(lambda: now)
    subject.check([1, 2], PARAMS)
    subject.add(request_digest([1, 2], PARAMS))
    subject.check([1, 2, 3], PARAMS)
    subject.check([1, 2], PARAMS, adapter=3)
    subject.check([1, 2], replace(PARAMS, stop_token_ids=frozenset({7})))
    with pytest.raises(PoisonRequestError):
        subject.check([1, 2], PARAMS)
    now += REFUSE_S
    subject.check([1, 2], PARAMS)


def test_a_digest_is_refused_by_all_ingresses():
    async def scenario() -> None:
        async with scene() as now:
            await now.supervisor.refuse(request_digest([1, 2], PARAMS))
            refused = now.client._refusals
            await until(lambda: bool(refused._until))
            with pytest.raises(PoisonRequestError):
                await anext(now.client.generate("a", [1, 2], PARAMS))

    run(scenario())
