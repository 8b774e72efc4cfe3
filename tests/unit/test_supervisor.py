"""Leases with a clock of our own; the supervisor over groups of fake ranks; which supervisor an ingress gets."""

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any
from unittest.mock import ANY

import pytest
from ray.exceptions import ActorDiedError

from cluster.supervisor import actor, group, leases, supervisor
from cluster.supervisor.leases import LEASE_S, SUCCESSOR_S, Leases
from cluster.supervisor.saved_state import GroupState, PoolState
from cluster.supervisor.status import GroupHealth
from tests.unit.client_scene import OfFakes, end_tasks
from tests.unit.ray_fakes import FakeHandle, FakeRank, phalanx_config, rank_config, until
from workers.wire.token_stream import TokenReceiver


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(coroutine: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await coroutine

    return asyncio.run(bounded())


def test_a_lease_without_heartbeats_expires_and_cannot_be_renewed():
    clock = Clock()
    subject = Leases(300.0, clock)
    kept, lost = subject.open("a", 0), subject.open("b", 1)
    assert subject.ingress_ids == {"a", "b"} and kept != lost
    clock.now += LEASE_S - 1
    assert subject.renew(kept) and subject.expired() == []
    clock.now += 2
    assert subject.expired() == [(lost, "b")] and subject.of_group(1) == {lost}
    assert subject.close(lost) == 1 and subject.close(lost) is None
    assert not subject.renew(lost) and subject.renew(kept)
    assert subject.ingress_ids == {"a"}
    assert subject.open("b", 1) != lost, "the streams of both leases must differ"


def test_the_first_ingress_gets_more_time_than_the_next():
    clock = Clock()
    subject = Leases(300.0, clock)
    for _ in range(2):
        clock.now += 299
        assert not subject.abandoned()
        subject.restart_wait()
    lease = subject.open("a", 0)
    clock.now += 1000
    assert not subject.abandoned()
    subject.close(lease)
    subject.close(lease)
    clock.now += SUCCESSOR_S - 1
    assert not subject.abandoned()
    clock.now += 2
    assert subject.abandoned()


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """How often the supervisor ended its own process."""
    calls: list[bool] = []
    monkeypatch.setattr(supervisor, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(supervisor, "_kill_own_actor", lambda: calls.append(True))
    yield calls


async def serving() -> OfFakes:
    subject = OfFakes(phalanx_config())
    await subject.start(phalanx_config())
    await until(lambda: subject._pool.groups[0].health.state == "serving")
    return subject


async def end(subject: OfFakes) -> None:
    await end_tasks(subject)
    for rank in subject.fake_ranks:
        if rank.ended is not None:
            rank.ended.cancel()


def test_a_start_with_another_configuration_is_refused():
    async def scenario() -> None:
        subject = await serving()
        await subject.start(phalanx_config())
        assert len(subject.fake_ranks[0].calls["start"]) == 1, "only the first start counts"
        with pytest.raises(ValueError, match="already running with another configuration"):
            await subject.start(phalanx_config(3))
        await end(subject)

    run(scenario())


def test_healths_are_pushed_when_they_change():
    async def scenario() -> None:
        subject = OfFakes(phalanx_config())
        seen = await subject.healths()
        assert seen == [GroupHealth("starting", 0, "")]
        news = asyncio.create_task(subject.changed_healths(seen))
        await subject.start(phalanx_config())
        assert await news == [GroupHealth("serving", 0, "")]
        await until(lambda: bool(subject.fake_ranks[0].calls["done"]))
        news = asyncio.create_task(subject.changed_healths(await news))
        await asyncio.sleep(0.01)
        assert not news.done()
        subject.fake_ranks[0].ended.set_exception(ActorDiedError())
        assert await news == [GroupHealth("failed", 0, "rank 0: its process died")]
        await end(subject)

    run(scenario())


def test_an_expired_ingress_loses_its_streams_and_must_register_again(monkeypatch, caplog):
    monkeypatch.setattr(leases, "LEASE_S", 0.2)
    monkeypatch.setattr(supervisor, "LEASE_S", 0.2)
    counts = {"request_success": {("stop",): [3.0]}, "ingress_cpu_seconds": {("x",): [1.0]}}

    async def scenario() -> None:
        subject = await serving()
        registration = await subject.register("a", 0)
        assert registration.members.epoch == 0 and len(registration.members.ranks) == 2
        kept = (await subject.register("b", 0)).lease_id
        assert (await subject.heartbeat("a", [registration.lease_id], counts)).expired == []
        for _ in range(15):
            await asyncio.sleep(0.02)
            assert (await subject.heartbeat("b", [kept], {})).expired == []
        closed = [rank.calls["close_stream"] for rank in subject.fake_ranks]
        assert closed == [[(0, registration.lease_id)]] * 2
        lost = registration.lease_id
        assert (await subject.heartbeat("a", [lost, kept], counts)).expired == [lost]
        total = await subject.ingress_metrics("b", {})
        assert total["request_success"] == {("stop",): [3.0]}, "it must stay counted, once"
        again = (await subject.register("a", 0)).lease_id
        assert again != lost and (await subject.heartbeat("a", [again], counts)).expired == []
        total = await subject.ingress_metrics("b", {})
        assert total["request_success"] == {("stop",): [3.0]}
        await end(subject)

    monkeypatch.setattr(FakeRank, "close_stream", lambda self, *a: self._note("close_stream", *a))
    run(scenario())
    assert "a sent no heartbeat for 0.2 s" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_a_supervisor_without_ingresses_ends_itself_and_its_ranks(monkeypatch, killed, fails):
    monkeypatch.setattr(leases, "SUCCESSOR_S", 0.1)
    monkeypatch.setattr(supervisor, "LEASE_S", 0.1)

    async def scenario() -> None:
        subject = await serving()
        lease = (await subject.register("a", 0)).lease_id
        if fails:
            subject.fake_ranks[0].ended.set_exception(ActorDiedError())
        await asyncio.sleep(0.15)
        assert not killed or not fails
        await subject.heartbeat("a", [lease], {})
        await subject.unregister(lease)
        for rank in subject.fake_ranks:
            if not rank.ended.done():
                rank.ended.set_result(None)
        await until(lambda: bool(killed))
        assert subject.launcher.killed >= 1
        await end(subject)

    monkeypatch.setattr(FakeRank, "close_stream", lambda self, *args: self._note("c", *args))
    run(scenario())
    assert killed == [True]


def test_draining_ends_when_every_ingress_has_finished():
    async def scenario() -> None:
        subject = await serving()
        for name in ("a", "b"):
            await subject.register(name, 0)
        waiting = asyncio.create_task(subject.drain_requested())
        await subject.drain(7.0)
        assert await waiting == 7.0 and subject._pool.groups[0].health.state == "draining"
        await subject.drained("a")
        assert not await subject.is_drained()
        await subject.drained("b")
        assert await subject.is_drained()
        await end(subject)

    run(scenario())


def test_a_server_of_a_killed_launcher_ends(monkeypatch, killed):
    """In a Ray cluster that goes on, Serve would keep the ingresses for ever."""
    monkeypatch.setattr(supervisor, "LEASE_S", 0.1)
    monkeypatch.setattr(supervisor, "LAUNCHER_LEASE_S", 0.3)
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 0.02)
    deleted = []
    monkeypatch.setattr(supervisor, "_delete_application", deleted.append)

    async def scenario() -> None:
        subject = await serving()
        await subject.register("a", 0)
        for _ in range(10):
            await subject.launcher_heartbeat()
            await asyncio.sleep(0.05)
        assert not deleted
        await until(lambda: bool(killed))
        assert deleted == [phalanx_config().serve.app_name] and subject.launcher.killed >= 1
        await end(subject)

    run(scenario())


def adopt(subject: OfFakes, launcher: Any) -> None:
    """Let a supervisor find the ranks of another launcher."""
    subject._pool.groups[0]._roster._launcher = launcher
    launcher.group = subject._pool.groups[0]


async def restarted(subject: OfFakes, changed: Any = None) -> OfFakes:
    """The supervisor in its next process, over the same ranks."""
    await end_tasks(subject)
    successor = OfFakes(phalanx_config())
    successor.fake_ranks, successor.launcher = subject.fake_ranks, subject.launcher
    adopt(successor, subject.launcher)
    await successor.recover(PoolState({"app": GroupState(0, changed)}))
    return successor


def test_a_restarted_supervisor_finds_the_ranks_and_the_leases():
    async def scenario() -> None:
        first = await serving()
        seen, lease = await first.healths(), (await first.register("a", 0)).lease_id
        receiver = TokenReceiver("127.0.0.1", 0)
        for rank in first.fake_ranks:
            stream = receiver.open_stream(rank.rank)
            await rank.open_stream(0, lease, receiver.address, stream)
        subject = await restarted(first)
        assert await subject.healths() == seen, "an ingress must notice nothing"
        assert (await subject.heartbeat("a", [lease], {})).expired == []
        registration = await subject.register("b", 0)
        assert [info.rank for info in registration.members.infos] == [0, 1]
        assert registration.members.ranks == subject.launcher.handles
        for rank in subject.fake_ranks:
            assert len(rank.calls["start"]) == 1 and not rank.calls["leave_epoch"]
        await until(lambda: len(subject.fake_ranks[0].calls["done"]) == 2)
        subject.fake_ranks[0].ended.set_exception(ActorDiedError())
        news = await subject.changed_healths(seen)
        assert news == [GroupHealth("failed", 0, "rank 0: its process died")]
        await end(subject)
        for rank in subject.fake_ranks:
            rank.close()
        receiver.close()

    run(scenario())


def test_a_restarted_supervisor_goes_on_with_the_settings_of_its_changes(monkeypatch):
    changed = phalanx_config(3)
    resolved = lambda config: rank_config(config.cluster.ranks)  # noqa: E731
    monkeypatch.setattr(supervisor, "resolve_on_cluster", resolved)

    async def scenario() -> None:
        first = await serving()
        subject = await restarted(first, changed)
        assert subject._state.of("app").config == changed
        assert subject._pool.groups[0]._roster.wanted.num_ranks == 3
        await end(subject)
        empty = OfFakes(phalanx_config())
        empty.launcher.all = []
        await empty.recover(PoolState({"app": GroupState(-1, changed)}))
        assert empty._state.of("app").config is None, "the start begins with its own settings"
        assert empty._pool.groups[0]._roster.wanted.num_ranks == 2
        await end(empty)

    run(scenario())


def test_a_restarted_supervisor_rebuilds_a_group_that_does_not_serve():
    async def scenario() -> None:
        first = await serving()
        first._pool.groups[0].attempts.limit = 1
        first.launcher.handles[1].dead = True
        await first.fake_ranks[0].leave_epoch(4)
        subject = OfFakes(phalanx_config())
        subject._pool.groups[0].attempts.limit = 1
        adopt(subject, first.launcher)
        await subject.recover(PoolState())
        reason = "the supervisor was restarted, and rank 0, 1 did not serve"
        assert await subject.healths() == [GroupHealth("rebuilding", 4, reason)]
        await until(lambda: subject._pool.groups[0].health.alive)
        assert subject._pool.groups[0].health.epoch == 5, "rank 0 joins no epoch before 4"
        kept, created = first.launcher.ranks
        assert kept is first.fake_ranks[0] and created.calls["start"] == [(5, ANY)]
        await end(first)
        await end(subject)

    run(scenario())


def test_a_supervisor_that_is_restarted_before_its_ranks_exist_starts_them():
    async def scenario() -> None:
        subject = OfFakes(phalanx_config())
        subject.launcher.all, kept = [], subject.launcher.all
        jobs = subject._run
        subject._run = lambda: (setattr(subject.launcher, "all", kept), jobs())
        await subject.recover(PoolState())
        await until(lambda: subject._pool.groups[0].health.state == "serving")
        assert subject._pool.groups[0].health.epoch == 0
        await end(subject)

    run(scenario())


class Candidate:
    """What `actor.start` sees of a supervisor."""

    def __init__(self, state: str):
        self.state, self.exits = state, 0

    async def start(self, config: Any) -> None:
        """Nothing to do."""

    async def healths(self) -> list[GroupHealth]:
        return [GroupHealth(self.state, 0, "rank 1: its process died")]

    async def exit(self) -> None:
        self.exits += 1
        self.handle.dead = True
        raise ActorDiedError


def candidates(monkeypatch: pytest.MonkeyPatch, *states: str) -> list[Candidate]:
    """`get_or_create` returns the first one until it is dead, and twice more, then the next."""
    monkeypatch.setattr(actor, "POLL_S", 0.001)
    found = [Candidate(state) for state in states]
    for candidate in found:
        candidate.handle = FakeHandle(candidate)
    queue = [handle for c in found for handle in (c.handle,) * 3]

    def get_or_create(_: Any) -> FakeHandle:
        return queue.pop(0) if queue[0].dead else queue[0]

    monkeypatch.setattr(actor, "get_or_create", get_or_create)
    return found


def test_a_failed_supervisor_is_replaced(monkeypatch):
    failed, fresh = candidates(monkeypatch, "failed", "starting")
    failed.start = None  # it would refuse other settings
    found = run(actor.start(phalanx_config(), replace_failed=True)).target
    assert found is fresh and failed.exits == 1


def test_a_living_supervisor_is_shared(monkeypatch):
    (subject,) = candidates(monkeypatch, "serving")
    assert run(actor.start(phalanx_config(), replace_failed=True)).target is subject
    assert not subject.exits


def test_the_launchers_supervisor_is_never_replaced(monkeypatch):
    (subject,) = candidates(monkeypatch, "failed")
    handle = run(actor.start(phalanx_config(), replace_failed=False))
    assert handle.target is subject and not subject.exits
    subject.handle.dead = True
    with pytest.raises(ActorDiedError):
        run(actor.start(phalanx_config(), replace_failed=False))


def test_a_supervisor_that_cannot_be_made_is_an_error(monkeypatch):
    broken = Candidate("starting")

    async def start(_: Any) -> None:
        error = ActorDiedError()
        error._actor_init_failed = True
        raise error

    broken.start = start
    monkeypatch.setattr(actor, "get_or_create", lambda _: FakeHandle(broken))
    with pytest.raises(ActorDiedError):
        run(actor.start(phalanx_config(), replace_failed=True))
