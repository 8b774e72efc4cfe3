"""A pool of two fake groups: they fail, rebuild and drain apart, and each operator's call names its group."""

import asyncio
from typing import Any

import pytest

from cluster.client import engine_client, router
from cluster.errors import BadRequestError, EngineDeadError
from cluster.supervisor import operations
from tests.unit.client_scene import OfFakes, Scene, run, scene, second_ingress, use_fakes
from tests.unit.numbered_router import Router
from tests.unit.ray_fakes import rank_config, until

A, B = 0, 1


@pytest.fixture(autouse=True)
def two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(OfFakes, "names", ("a", "b"))
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 3, "hang_timeout_s": 0.5})


async def answer(now: Scene, group: int, name: str, first: int, *, finish: bool = False) -> None:
    """The rank that has a request sends its token number `first`, and the client gets it."""
    short = name.split("~")[0]
    await until(lambda: any(name in rank.requests for rank in now.ranks_of(group)))
    (rank,) = (rank for rank in now.ranks_of(group) if name in rank.requests)
    await rank.emit(name, first, 1, finish=finish)
    await until(lambda: len(now.answers[short]) == first + 1)


def test_requests_spread_over_the_ranks_of_both_groups() -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked = [now.ask(f"r{number}") for number in range(4)]
            ranks = [*now.ranks_of(A), *now.ranks_of(B)]
            await until(lambda: all(len(rank.requests) == 1 for rank in ranks))
            stats = await now.client.rank_stats()
            assert [each["rank"] for each in stats] == [0, 1, 2, 3] and now.client.num_ranks == 4
            assert list(now.client.token_ages()) == [0, 1, 2, 3]
            for rank in ranks:
                (name,) = rank.requests
                await rank.emit(name, 0, 1, finish=True)
            await asyncio.gather(*asked)
            assert now.outstanding == (0, 0, 0, 0)

    run(scenario())


def test_ranks_of_each_group_take_turns_when_a_request_visits_two_groups():
    router = Router([2, 3])
    picks = [(router.pick([0], 0, groups=[0]), router.pick([0], 0, groups=[1])) for _ in range(6)]
    assert [first for first, _ in picks] == [0, 1] * 3
    assert [second for _, second in picks] == [2, 3, 4] * 2


def test_a_group_that_fails_ends_its_own_requests_alone() -> None:
    async def scenario() -> None:
        async with scene() as now:
            fails, lives = now.ask("x", rank=0), now.ask("y", rank=2)
            await answer(now, A, "x", 0)
            await answer(now, B, "y", 0)
            leases = now.client._groups[B].lease_id
            now.ranks_of(A)[0].fail["run_stage"] = ValueError("the weights are gone")
            await now.kill(1, A)
            with pytest.raises(EngineDeadError, match="the weights are gone"):
                await fails
            await answer(now, B, "y", 1)
            assert now.client.health() == (True, "") and list(now.client.token_ages()) == [2, 3]
            assert now.client._groups[B].lease_id == leases, "the streams of the other group stay"
            asked = [now.ask(name) for name in "uvw"]
            for name in "uvw":
                await answer(now, B, name, 0, finish=True)
            with pytest.raises(EngineDeadError, match="the weights are gone"):
                await now.ask("z", rank=0)
            await answer(now, B, "y", 2, finish=True)
            await asyncio.gather(lives, *asked)
            assert now.answers["y"] == [100, 101, 102] and now.outstanding == (0, 0, 0, 0)

    run(scenario())


def test_requests_of_a_group_that_rebuilds_wait_alone() -> None:
    async def scenario() -> None:
        async with scene() as now:
            waits, lives = now.ask("x", rank=0), now.ask("y", rank=2)
            await answer(now, A, "x", 0)
            await answer(now, B, "y", 0)
            begins = now.hold_rebuild(A)
            await now.kill(1, A)
            await until(lambda: not now.client._groups[A].reachable)
            pinned, free = now.ask("p", rank=1), now.ask("f")
            await answer(now, B, "f", 0, finish=True)
            await answer(now, B, "y", 1)
            assert now.client._groups[A].health.state == "rebuilding" and not pinned.done()
            begins.set()
            await answer(now, A, "x~2", 1, finish=True)
            await answer(now, A, "p", 0, finish=True)
            await answer(now, B, "y", 2, finish=True)
            await asyncio.gather(waits, lives, pinned, free)
            assert now.answers["x"] == [100, 101]
            assert {call[0] for call in now.ranks_of(B)[0].calls["open_stream"]} == {0}

    run(scenario())


def test_a_group_gets_other_ranks_while_the_other_group_serves() -> None:
    """The numbers of the other group's ranks change, and its requests release what they took."""

    async def scenario() -> None:
        async with scene() as now:
            lives = now.ask("y", rank=3)
            await answer(now, B, "y", 0)
            first, second = now.supervisor._pool.groups
            await first.change(rank_config(3), "scale to 3 ranks")
            await until(lambda: now.client.num_ranks == 5)
            assert now.outstanding == (0, 0, 0, 0, 11) and second.health.epoch == 0
            await answer(now, B, "y", 1, finish=True)
            await lives
            assert now.outstanding == (0,) * 5

    run(scenario())


def test_a_drain_of_one_group_ends_it_after_its_requests() -> None:
    async def scenario() -> None:
        async with scene() as now:
            leaves, lives = now.ask("x", rank=0), now.ask("y", rank=2)
            await answer(now, A, "x", 0)
            await answer(now, B, "y", 0)
            await now.client.drain(60.0, "a")
            await until(lambda: now.client._groups[A].health.state == "draining")
            new = [now.ask(f"n{number}") for number in range(4)]
            await until(lambda: sum(len(rank.requests) for rank in now.ranks_of(B)) == 5)
            assert now.supervisor._pool.groups[A].health.state == "draining"
            for rank in now.ranks_of(A):
                assert not rank.calls["stop"], "its request goes on"
            await answer(now, A, "x", 1, finish=True)
            await leaves
            await until(lambda: bool(now.ranks_of(A)[0].calls["stop"]))
            assert now.client._groups[A].lease_id == "", "the ingress has given its lease back"
            for rank in now.ranks_of(A):
                rank.ended.set_result(None)
            await until(lambda: bool(now.supervisor.launchers[A].killed))
            assert now.client._groups[A].health.state == "stopped"
            assert not now.supervisor.launchers[B].killed
            assert not now.supervisor._draining.is_set(), "the server goes on"
            for number in range(4):
                await answer(now, B, f"n{number}", 0, finish=True)
            await answer(now, B, "y", 1, finish=True)
            await asyncio.gather(lives, *new)
            with pytest.raises(BadRequestError, match="no other group answers than 'b'"):
                await now.client.drain(60.0, "b")

    run(scenario())


def test_an_ingress_that_comes_during_the_drain_of_a_group_does_not_wait_for_its_end() -> None:
    """Nor does a request for one of the group's ranks, which would never reach it."""

    async def scenario() -> None:
        async with scene(limits={"rebuild_wait_s": 1.0}) as now:
            leaves = now.ask("x", rank=0)
            await answer(now, A, "x", 0)
            await now.client.drain(60.0, "a")
            async with second_ingress(now) as other:
                assert other.client.health() == (True, "")
                asked = other.ask("y")
                await answer(other, B, "y", 0, finish=True)
                await asked
                with pytest.raises(EngineDeadError, match="the group is draining"):
                    await other.ask("z", rank=0)
            assert now.client._groups[A].health.state == "draining"
            await answer(now, A, "x", 1, finish=True)
            await leaves

    run(scenario())


def test_an_operators_call_names_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(config: Any, settings: list[str], allowed: Any) -> Any:
        ranks = int(settings[0].partition("=")[2]) if settings else config.cluster.ranks
        cluster = config.cluster.model_copy(update={"ranks": ranks})
        return config.model_copy(update={"cluster": cluster})

    monkeypatch.setattr(operations, "changed_config", changed)
    monkeypatch.setattr(
        operations, "resolve_on_cluster", lambda config: rank_config(config.cluster.ranks)
    )

    async def scenario() -> None:
        async with scene() as now:
            first, second = now.supervisor._pool.groups
            await now.client.scale(3, "b")
            assert (len(first.members.ranks), len(second.members.ranks)) == (2, 3)
            with pytest.raises(BadRequestError, match="name one of the groups 'a', 'b'"):
                await now.client.scale(1)
            with pytest.raises(BadRequestError, match="there is no group 'c'"):
                await now.client.restart([], "c")
            await now.client.restart([], "a")
            assert (first.health.epoch, second.health.epoch) == (1, 1)
            await now.client.restart([])
            assert (first.health.epoch, second.health.epoch) == (2, 2)
            assert len(second.members.ranks) == 3, "each group keeps its own changes"

    run(scenario())


def test_the_task_of_a_group_that_breaks_fails_this_group() -> None:
    async def scenario() -> None:
        async with scene() as now:
            lives = now.ask("y", rank=2)
            await until(lambda: bool(now.ranks_of(A)[0].calls["done"]))

            async def breaks(*_: Any) -> None:
                raise KeyError("a bug")

            now.supervisor._pool.groups[A]._rebuild = breaks
            await now.kill(1, A)
            await until(lambda: now.client._groups[A].health.ended)
            assert now.client._groups[A].health.error == "KeyError: 'a bug'"
            await answer(now, B, "y", 0, finish=True)
            await lives

    run(scenario())


def test_a_task_of_the_client_that_breaks_ends_its_ingress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("x", rank=0)
            await answer(now, A, "x", 0)
            now.client.check()
            now.client.metrics_source = lambda: {}["a bug"]
            with pytest.raises(EngineDeadError, match="this ingress failed: KeyError: 'a bug'"):
                await asked
            with pytest.raises(EngineDeadError, match="this ingress failed"):
                now.client.check()
            assert not now.client.health()[0]

    monkeypatch.setattr(engine_client, "HEARTBEAT_S", 0.05)
    run(scenario())


def test_only_ranks_of_the_given_groups_are_chosen():
    router = Router([2, 2])
    assert [router.pick([0], 9, groups=(1,)) for _ in range(3)] == [2, 3, 2]
    assert [router.pick([0], 9, groups=(0, 1)) for _ in range(2)] == [0, 1]
    with pytest.raises(AssertionError, match="no rank"):
        router.pick([0], 9, groups=())


def test_a_group_that_gets_other_ranks_leaves_the_loads_of_other_groups():
    subject = router.Router([2, 2], cache_tokens=10**6)
    old = subject.pick([0], 99, pinned=(0, 1)).load
    other = subject.pick([1] * 32, 9, pinned=(1, 0)).load
    subject.resize(0, 3, 10**6)
    assert [load.outstanding for load in subject.loads] == [0, 0, 0, other.outstanding, 0]
    assert other.place == subject.place(3) == (1, 0) and other.num_held([*other.held]) == 1
    old.release(100)
    assert old.outstanding == 0, "a request of before counts at its rank of before"
    assert subject.pick([0], 0, pinned=(0, 7), groups=(0,)).load.place[0] == 0, "that rank is gone"
