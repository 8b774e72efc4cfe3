"""Two ingresses through the failures of one group: each brings its own requests to the next epoch, no other ones."""

import asyncio

import pytest

from cluster.errors import PoisonRequestError
from cluster.supervisor.status import GroupHealth
from tests.unit import ray_fakes
from tests.unit.client_scene import OfFakes, Scene, run, scene, second_ingress, use_fakes
from tests.unit.ray_fakes import until
from tests.unit.test_stream_faults import FarRank, far_scene, whole


@pytest.fixture(autouse=True)
def rebuilding(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 1, "hang_timeout_s": 0.5})


def test_both_recover_their_own_streams(monkeypatch) -> None:
    monkeypatch.setattr(ray_fakes, "FakeRank", FarRank)

    async def scenario() -> None:
        async with far_scene() as one, second_ingress(one) as other:
            one.supervisor.launcher.make = lambda rank: setattr(rank, "may_end", False)
            for rank in one.ranks:
                rank.may_end = False
            mine = [one.ask(f"a{number}") for number in range(4)]
            theirs = [other.ask(f"b{number}") for number in range(4)]
            answers = one.answers, other.answers
            await until(lambda: all(all(found.values()) for found in answers))
            await one.kill(1)
            await until(lambda: one.group.epoch == other.group.epoch == 1)
            before = [(got, len(got)) for found in answers for got in found.values()]
            await until(lambda: all(len(got) > count for got, count in before))
            for rank in one.ranks:
                rank.may_end = True
            await whole(one, mine)
            await whole(other, theirs)

    run(scenario())


def test_both_send_one_poison_and_the_server_stays() -> None:
    """A trial of one ingress is no failure of the rank by itself for the other one: a single rebuild counts."""

    async def begin(now: Scene, name: str) -> None:
        await until(lambda: name in now.ranks[1].requests)
        await now.ranks[1].emit(name, 0, 0)
        await until(lambda: now.group.open[name].begun)

    async def scenario() -> None:
        async with scene() as one, second_ingress(one) as other:
            asked = [now.ask(name, rank=1) for now, name in ((one, "a"), (other, "b"))]
            await begin(one, "a")
            await begin(other, "b")
            await one.kill(1)
            for now, name in (
                (one, "a~2"),
                (other, "b~3"),
                (one, "a~4"),
                (other, "b~5"),
                (one, "a~6"),
                (other, "b~7"),
            ):
                await begin(now, name)
                await now.kill(1)
            for found in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(found, PoisonRequestError)
            group = one.supervisor._pool.groups[0]
            await until(lambda: group.health == GroupHealth("serving", 7, ""))

    run(scenario())
