"""Failures while a server drains: its requests finish, and it ends only when the ingresses have finished."""

import pickle
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.client import group_client
from cluster.supervisor.status import GroupHealth
from tests.unit.client_scene import OfFakes, Scene, end_tasks, run, scene, use_fakes
from tests.unit.ray_fakes import phalanx_config, until
from tests.unit.test_client_faults import RestartedHandle, finish

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def rebuilding(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 3, "hang_timeout_s": 0.5})
    monkeypatch.setattr(group_client, "RETRY_S", 0.01)
    monkeypatch.setattr("tests.unit.client_scene.FakeHandle", RestartedHandle)


async def drain_with_a_request(now: Scene) -> Any:
    """Begin to drain while a request has its first token; return the request's task."""
    asked = now.ask("a", rank=0)
    await until(lambda: "a" in now.ranks[0].requests)
    await now.ranks[0].emit("a", 0, 1)
    await until(lambda: now.answers["a"] == [100])
    await now.client.drain(LIMIT_S)
    await until(lambda: now.group.health.state == "draining")
    return asked


async def restart_supervisor(now: Scene, *, with_ranks: bool) -> None:
    """End the supervisor's process, and its ranks at the same time; its next process has the state from the GCS."""
    first = now.supervisor
    await end_tasks(first)
    successor = OfFakes(phalanx_config())
    if with_ranks:
        first.launcher.kill()
        for rank in first.launcher.ranks:
            rank.close()
        found, successor.launcher.all = successor.launcher.all, []
        run_tasks = successor._run

        def start_ranks() -> None:
            successor.launcher.all = found
            run_tasks()

        successor._run = start_ranks  # type: ignore[method-assign]
    else:
        successor.fake_ranks, successor.launcher = first.fake_ranks, first.launcher
        successor.launchers = first.launchers
        successor._pool.groups[0]._roster._launcher = first.launcher
        first.launcher.group = successor._pool.groups[0]
    await successor.recover(pickle.loads(pickle.dumps(first._state)))
    now.supervisor = successor
    now.handle.restart(successor)


@pytest.mark.parametrize("with_ranks", [False, True], ids=["supervisor", "supervisor and ranks"])
def test_a_drain_outlives_the_supervisor(with_ranks) -> None:
    """The next supervisor served again, and took a server for drained that had no ingress yet."""

    async def scenario() -> None:
        async with scene() as now:
            asked = await drain_with_a_request(now)
            await restart_supervisor(now, with_ranks=with_ranks)
            assert not await now.supervisor.is_drained(), "its ingress has a request"
            assert await now.supervisor.drain_requested() == LIMIT_S
            group = now.supervisor._pool.groups[0]
            await until(lambda: group.health == GroupHealth("draining", int(with_ranks), ""))
            await finish(now, 0, "a~2" if with_ranks else "a")
            await asked
            assert now.answers["a"] == [100, 101]
            await now.client.report_drained()
            assert await now.supervisor.is_drained()
            await restart_supervisor(now, with_ranks=False)
            assert await now.supervisor.is_drained(), "an ingress reports it once"
            await end_tasks(now.supervisor)

    run(scenario())


def test_a_second_failure_in_a_drain_loses_no_request() -> None:
    """A rank dies, and while the group rebuilds the other one."""

    async def scenario() -> None:
        async with scene() as now:
            asked = await drain_with_a_request(now)
            second = now.supervisor.launcher.handles[1]
            second.target.hang.add("join_group")
            await now.kill(0)
            joins = second.target.calls["join_group"]
            await until(lambda: len(joins) > 1)
            second.dead = True
            second.target.fail["join_group"] = ActorDiedError()
            await until(lambda: now.group.health == GroupHealth("draining", 2, ""))
            await finish(now, 0, "a~2")
            await asked
            assert now.answers["a"] == [100, 101]
            await now.client.report_drained()
            assert await now.supervisor.is_drained()

    run(scenario())
