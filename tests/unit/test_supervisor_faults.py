"""The supervisor, and a rank that follows it, where Ray's GCS stalls, nodes are lost, and tasks break."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError

from cluster.supervisor import actor as supervisor_actor
from cluster.supervisor import group, leases, orphans, relocation, roster, saved_state, supervisor
from cluster.supervisor.saved_state import PoolState, SavedState
from kernels.host.awake import AwakeTime
from tests.unit.client_scene import OfFakes, end_tasks
from tests.unit.ray_fakes import FakeRank, fake_group, phalanx_config, rank_config, until
from tests.unit.test_supervisor import Clock, run
from workers.rank import actor
from workers.rank.actor import RankActor


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(relocation, "GROW_S", 0.01)
    monkeypatch.setattr(roster, "RESTOCK_S", 0.01)
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 0.02)


def test_a_supervisor_that_was_blocked_blames_neither_ingress_nor_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads the heartbeats of a minute in Ray's GCS after that minute; the server is healthy."""
    monkeypatch.setattr(supervisor, "LEASE_S", 0.1)
    monkeypatch.setattr(leases, "LEASE_S", 0.1)
    monkeypatch.setattr(supervisor, "LAUNCHER_LEASE_S", 0.3)
    monkeypatch.setattr(FakeRank, "close_stream", lambda self, *a: self._note("c", *a))
    deleted: list[str] = []
    monkeypatch.setattr(supervisor, "_delete_application", deleted.append)
    monkeypatch.setattr(supervisor, "_kill_own_actor", lambda: None)

    async def scenario() -> None:
        clock = Clock()
        subject = OfFakes(phalanx_config())
        awake = AwakeTime(supervisor.LEASE_S / 5, clock)
        subject._awake, subject._leases._clock = awake, awake.look
        await subject.start(phalanx_config())
        await until(lambda: subject._pool.groups[0].health.state == "serving")
        lease = (await subject.register("a", 0)).lease_id
        await subject.launcher_heartbeat()
        judged: list[float] = []
        expired = subject._leases.expired
        subject._leases.expired = lambda: (judged.append(clock.now), expired())[1]

        async def pass_time(step_s: float, count: int = 1) -> None:
            for _ in range(count):
                clock.now += step_s
                await until(lambda: bool(deleted) or clock.now in judged)

        await pass_time(60.0)
        assert not deleted and subject._leases.of_group(0) == {lease}
        await pass_time(0.02, 6)
        assert not deleted and not subject._leases.of_group(0), "it is silent while the loop runs"
        await pass_time(0.02, 14)
        assert deleted, "a launcher that is silent while the loop runs has ended"
        await end_tasks(subject)

    run(scenario())


def test_a_broken_watch_of_the_leases_fails_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LEASE_S", 0.05)

    async def scenario() -> None:
        subject = OfFakes(phalanx_config())
        subject._leases.expired = lambda: {}["a bug"]
        rank = subject.fake_ranks[0]

        async def dies(_: str) -> None:
            await until(lambda: rank.died)
            raise ActorDiedError

        rank.run_stage = dies  # the group still starts, and its start fails as its ranks end
        await subject.start(phalanx_config())
        await until(lambda: subject._pool._tasks[0].done)
        assert subject._pool.healths[0].error == "the supervisor failed: KeyError: 'a bug'"
        assert subject.launcher.killed
        await end_tasks(subject)

    run(scenario())


def test_a_look_for_room_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        subject, _, launcher = fake_group(2, rebuild_attempts=3, shrink=True)
        running = asyncio.create_task(subject.run())
        await until(lambda: bool(launcher.ranks[0].calls["done"]))
        failures = 3
        has_capacity = subject._roster.has_room_to_grow

        async def fails() -> bool:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise ConnectionError("Ray's GCS does not answer")
            return await has_capacity()

        subject._roster.has_room_to_grow = fails
        subject._roster.wanted = rank_config(3)  # as after a node was lost
        subject._set_serving()
        await until(lambda: len(subject.members.infos) == 3)
        assert failures < 0
        running.cancel()
        await subject.stop()

    run(scenario())


def test_a_standby_that_does_not_start_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        subject, _, launcher = fake_group(2, rebuild_attempts=3, standby_ranks=1)
        start, failures = launcher.start, 2

        async def fails(*args: Any) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise ConnectionError("Ray's GCS does not answer")
            return await start(*args)

        launcher.start = fails
        running = asyncio.create_task(subject.run())
        await until(lambda: len(launcher.standbys) == 1)
        assert subject.health.state == "serving"
        running.cancel()
        await subject.stop()

    run(scenario())
    assert caplog.text.count("Ray's GCS does not answer") == 2


class Kept:
    """Ray's key-value store in the GCS, which may stall."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _internal_kv_get(self, key: bytes, *, namespace: bytes) -> bytes | None:
        return self.values.get(key)

    def _internal_kv_put(self, key: bytes, value: bytes, *, namespace: bytes) -> None:
        assert self.goes_on.wait(60)
        self.values[key] = value

    def _internal_kv_del(self, key: bytes, *, namespace: bytes) -> None:
        self.values.pop(key, None)


def test_the_state_of_the_groups_is_kept_and_a_stalled_gcs_delays_no_rebuild(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()
    monkeypatch.setattr(saved_state, "internal_kv", kept)

    async def scenario() -> None:
        subject = object.__new__(supervisor_actor.SupervisorActor)
        subject._saved, subject._state = SavedState("1"), PoolState()
        assert (await subject._saved.load()) == PoolState()
        await subject._note_epoch("app", 3)
        assert (await subject._saved.load()).of("app").epoch == 3
        monkeypatch.setattr(supervisor_actor, "SAVE_S", 0.05)
        kept.goes_on.clear()
        await subject._note_epoch("app", 4)
        assert (await subject._saved.load()).of("app").epoch == 3, "the GCS has not answered"
        kept.goes_on.set()

    run(scenario())
    assert "Ray's GCS keeps no state of the groups now: TimeoutError()" in caplog.text


def test_a_rank_ends_with_its_place_when_its_supervisor_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of the supervisor's node is no RayActorError: ranks and places kept their GPUs."""
    ended: list[Any] = []
    monkeypatch.setattr(actor, "FOLLOW_S", 0.005)
    monkeypatch.setattr(actor.os, "_exit", lambda code: ended.append(code))
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: "place")
    monkeypatch.setattr(ray.util, "remove_placement_group", ended.append)
    unschedulable = ActorUnschedulableError("the node has ended")

    def follow(*answers: BaseException | None) -> int:
        """Follow a supervisor with these answers, the last one for ever; return the number of calls."""
        ended.clear()
        left, calls = list(answers), 0

        class Ping:
            def remote(self) -> Any:
                nonlocal calls
                calls += 1
                future = asyncio.get_running_loop().create_future()
                answer = left.pop(0) if len(left) > 1 else left[0]
                future.set_result(None) if answer is None else future.set_exception(answer)
                return future

        handle = SimpleNamespace(ping=Ping())
        run(RankActor.follow(object.__new__(RankActor), handle))
        return calls

    assert follow(unschedulable) == actor.LOST_CHECKS and ended == ["place", 1]
    again = [unschedulable, ActorUnavailableError("restarting", b"0" * 16), None]
    assert follow(*again, ActorDiedError()) == 4 and ended == ["place", 1]
    assert follow(KeyError("a bug")) == 1 and ended == [1]


def test_a_start_ends_the_ranks_of_supervisors_that_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lives, gone = "a" * 32, "b" * 32
    names = {
        "phalanx": [
            "supervisor:app",
            f"rank:app:{lives}:0:{'1' * 32}",
            f"rank:app:{gone}:0:{'2' * 32}",
            f"rank:other:{gone}:1:3@10.0.0.1",
            "something else",
        ],
        "another": [f"rank:app:{gone}:0:4"],
    }
    places = [f"app:{lives}", f"app:{gone}", f"app:{gone}:beside:2", "a user's"]
    ended: list[str] = []

    def get_actor(name: str, namespace: str) -> Any:
        assert namespace == "phalanx"
        return SimpleNamespace(name=name, _actor_id=bytes.fromhex(lives))

    actors = [{"name": n, "namespace": space} for space, found in names.items() for n in found]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: actors)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "kill", lambda handle: ended.append(handle.name))
    table = {str(i): {"name": name, "state": "CREATED"} for i, name in enumerate(places)}
    table["9"] = {"name": f"app:{gone}", "state": "REMOVED"}
    monkeypatch.setattr(orphans, "placement_group_table", lambda: table)
    monkeypatch.setattr(orphans.placement, "find", lambda name: name)
    monkeypatch.setattr(orphans, "remove_placement_group", ended.append)
    orphans.sweep()
    assert ended == [
        f"rank:app:{gone}:0:{'2' * 32}",
        f"rank:other:{gone}:1:3@10.0.0.1",
        f"app:{gone}",
        f"app:{gone}:beside:2",
    ]


def test_a_server_that_starts_during_a_sweep_keeps_its_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two servers of a cluster start at the same time: the place of one came after the names that the other had."""
    supervisor_id, removed = "a" * 32, []
    names: list[dict[str, str]] = []
    table: dict[str, dict[str, str]] = {}

    def other_starts() -> None:
        names.append({"namespace": "phalanx", "name": "supervisor:other"})
        table["1"] = {"name": f"other:{supervisor_id}", "state": "CREATED"}

    def list_names(**_: bool) -> list[dict[str, str]]:
        found = names.copy()
        other_starts()
        return found

    def list_places() -> dict[str, dict[str, str]]:
        return table.copy()

    handle = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: supervisor_id))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: handle)
    monkeypatch.setattr(ray.util, "list_named_actors", list_names)
    monkeypatch.setattr(orphans, "placement_group_table", list_places)
    monkeypatch.setattr(orphans.placement, "find", lambda name: name)
    monkeypatch.setattr(orphans, "remove_placement_group", removed.append)
    orphans.sweep()
    assert table and not removed


def test_a_supervisor_that_cannot_stop_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's GCS keeps its state, and may not answer; the name of the actor would refuse the next server."""
    killed: list[bool] = []
    monkeypatch.setattr(supervisor, "_kill_own_actor", lambda: killed.append(True))

    async def unanswered() -> None:
        raise ConnectionError("Ray's GCS does not answer")

    async def scenario() -> None:
        subject = OfFakes(phalanx_config())
        monkeypatch.setattr(subject, "stop", unanswered)
        with pytest.raises(ConnectionError):
            await subject.exit()

    run(scenario())
    assert killed == [True]
