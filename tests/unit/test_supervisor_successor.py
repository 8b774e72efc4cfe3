"""A supervisor without an ingress waits for the next one: while a group rebuilds, and after a sign of an ingress."""

from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.supervisor import supervisor
from cluster.supervisor.leases import SUCCESSOR_S, Leases
from tests.unit.ray_fakes import FakeRank, fake_group, phalanx_config, until
from tests.unit.test_supervisor import Clock, OfFakes, end, run


class Rebuilding(OfFakes):
    """Its group serves; after a death it rebuilds for ever, because new ranks do not answer."""

    def _create_groups(self, config: Any) -> list[Any]:
        group, self.fake_ranks, self.launcher = fake_group(2, rebuild_attempts=9)
        self.launchers = [self.launcher]
        self.launcher.make = lambda rank: rank.hang.add("describe")
        self.clock = Clock()
        return [group]

    async def lose_the_ingress(self) -> None:
        """Serve, until the only ingress is gone."""
        self._leases = Leases(300.0, self.clock)
        await self.start(phalanx_config())
        await until(lambda: self._pool.groups[0].health.state == "serving")
        await self.unregister((await self.register("a", 0)).lease_id)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(supervisor, "_kill_own_actor", lambda: None)
    monkeypatch.setattr(supervisor, "LEASE_S", 0.01)
    monkeypatch.setattr(FakeRank, "close_stream", lambda self, *a: self._note("c", *a))


def test_it_waits_while_its_group_rebuilds():
    async def scenario() -> None:
        subject = Rebuilding(phalanx_config())
        await subject.lose_the_ingress()
        subject.launcher.handles[0].dead = True
        subject.fake_ranks[0].ended.set_exception(ActorDiedError())
        await until(lambda: subject._pool.groups[0].health.state == "rebuilding")
        for _ in range(4):
            subject.clock.now += SUCCESSOR_S / 2
            await until(lambda: subject._leases._missing_since == subject.clock.now)
        assert subject._pool.groups[0].health.state == "rebuilding"
        await end(subject)

    run(scenario())


def test_it_waits_for_an_ingress_that_has_called():
    async def scenario() -> None:
        subject = Rebuilding(phalanx_config())
        await subject.lose_the_ingress()
        for _ in range(4):
            subject.clock.now += SUCCESSOR_S - 1
            await subject.start(phalanx_config())
            assert not subject._leases.abandoned()
        subject.clock.now += SUCCESSOR_S + 1
        assert subject._leases.abandoned()
        await end(subject)

    run(scenario())
