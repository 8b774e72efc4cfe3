"""A group that loses ranks, over fake ranks: rebuilds, replaced processes, the limit, a stop in between."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.supervisor import group
from cluster.supervisor.group import Group
from cluster.supervisor.heartbeat import STAGE_FACTOR
from tests.unit.ray_fakes import FakeLauncher, FakeRank, fake_group, rank_config, until
from workers.rank.step_loop import RankFailedError

HANG_TIMEOUT_S = 0.1


def run(coroutine: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await coroutine

    return asyncio.run(bounded())


@pytest.fixture(autouse=True)
def short_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 0.02)  # the fakes' loops do not end by a stop


class Scene:
    """A group that runs, and ways to hurt it."""

    def __init__(self, num_ranks: int = 3, **options: Any):
        options = {"hang_timeout_s": HANG_TIMEOUT_S, "rebuild_attempts": 3, **options}
        self.group: Group
        self.launcher: FakeLauncher
        self.group, _, self.launcher = fake_group(num_ranks, **options)
        self.task = asyncio.create_task(self.group.run())

    @property
    def ranks(self) -> list[FakeRank]:
        return self.launcher.ranks

    async def serving(self, epoch: int) -> None:
        await until(lambda: self.group.health[:3] == ("serving", epoch, ""))
        await until(lambda: all(rank.calls["done"][-1:] == [(epoch,)] for rank in self.ranks))

    def kill(self, rank: int) -> None:
        self.launcher.handles[rank].dead = True
        self.ranks[rank].ended.set_exception(ActorDiedError())

    async def close(self) -> None:
        await self.group.stop()
        await self.task


def test_a_dead_rank_gets_a_new_process_and_the_others_stay():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        before = now.ranks
        seen = now.group.health
        now.kill(1)
        await now.group.changed(seen)
        assert now.group.health[:3] == ("rebuilding", 1, "rank 1: its process died")
        await now.serving(1)
        assert now.launcher.replaced == [1] and now.launcher.killed == 0
        assert [a is b for a, b in zip(before, now.ranks, strict=True)] == [True, False, True]
        assert before[0].calls["leave_epoch"] == before[2].calls["leave_epoch"] == [(1,)]
        for rank in now.ranks:
            rendezvous = rank.calls["join_group"][-1][0]
            assert rendezvous.epoch == 1 and rank.calls["start"][-1][0] == 1
        names = {rank.calls["join_group"][-1][0].name for rank in now.ranks}
        assert len(names) == 1 and names != {before[0].calls["join_group"][0][0].name}
        assert len(now.ranks[0].calls["start"]) == 2 and len(now.ranks[1].calls["start"]) == 1
        assert now.group.members.epoch == 1 and now.group.members.ranks == now.launcher.handles
        await now.close()

    run(scenario())


def test_a_rank_that_fails_in_a_living_process_keeps_it():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        now.ranks[2].ended.set_exception(RankFailedError("KeyError: 7"))
        await now.serving(1)
        assert now.launcher.replaced == []
        assert now.launcher.num_spares == 1, "the spare process of the start is still there"
        now.kill(1)
        await now.serving(2)
        await until(lambda: now.launcher.num_spares == 2)
        await now.close()

    run(scenario())


def test_a_rank_that_hangs_gets_a_new_process(caplog):
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        now.ranks[0].hang.add("leave_epoch")
        now.kill(1)
        await now.serving(1)
        assert now.launcher.replaced == [0, 1]
        await now.close()

    run(scenario())
    assert "rank 0 did not leave its epoch within 0.1 s (cluster.hang_timeout_s)" in caplog.text


def test_a_stopped_rank_is_replaced_before_its_peers_leave():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        before = now.ranks
        before[1].hang.add("pulse")
        await now.serving(1)
        assert now.launcher.replaced == [1]
        assert [location.rank for location in now.launcher.ended_at] == [1], "for its SIGKILL"
        assert before[1].calls["leave_epoch"] == [], "its leave would only take time"
        assert before[0].calls["leave_epoch"] == [(1,)]
        rebuild = now.group.status.last_rebuild
        assert rebuild.reason == "rank 1: no sign of life for 0.1 s (cluster.hang_timeout_s)"
        names = [name for name, _ in rebuild.stages]
        assert names[:3] == ["detection", "replacement", "processes"] and names[-1] == "engines"
        assert rebuild.stages[0][1] == 0.1 and rebuild.seconds >= sum(
            s for _, s in rebuild.stages[1:]
        )
        assert now.group.status.num_rebuilds == 1
        await now.close()

    run(scenario())


@pytest.mark.parametrize("stage", ["describe", "host_rendezvous", "run_stage", "start"])
def test_a_rank_that_is_silent_in_a_rebuild_is_replaced_in_the_next(stage):
    async def scenario() -> None:
        now = Scene(hang_timeout_s=0.05)
        await now.serving(0)
        now.ranks[0].hang |= {stage, "pulse"}
        now.kill(1)
        await now.serving(2)
        assert now.launcher.replaced == [1, 0]
        rebuild = now.group.status.last_rebuild
        assert rebuild.reason.startswith("rank 1: its process died")
        await now.close()

    run(scenario())


def test_a_rank_that_is_silent_as_it_fetches_the_checkpoint_is_replaced_in_the_next():
    async def scenario() -> None:
        now = Scene(hang_timeout_s=0.05)
        roster = now.group._roster
        model = roster.config.model.model_copy(update={"revision": "0" * 40})
        roster.config = roster.wanted = roster.config.model_copy(update={"model": model})
        await now.serving(0)
        now.ranks[0].hang |= {"fetch_checkpoint", "pulse"}
        now.kill(1)
        await now.serving(2)
        assert now.launcher.replaced == [1, 0]
        await now.close()

    run(scenario())


def test_a_death_during_a_rebuild_begins_another():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)

        def dies(rank: FakeRank) -> None:
            if now.launcher.replaced == []:
                rank.fail = dict.fromkeys(("run_stage", "leave_epoch"), ActorDiedError())

        now.launcher.make = dies
        now.kill(1)
        await now.serving(2)
        assert now.launcher.replaced == [1, 1]
        assert now.ranks[0].calls["leave_epoch"] == [(1,), (2,)]
        await now.close()

    run(scenario())


@pytest.mark.parametrize(
    "method", ["describe", "host_rendezvous", "join_group", "run_stage", "start"]
)
def test_a_death_during_the_start_begins_another(method):
    async def scenario() -> None:
        now = Scene()
        rank = 0 if method == "host_rendezvous" else 1
        now.ranks[rank].fail = dict.fromkeys((method, "leave_epoch"), ActorDiedError())
        await now.group.changed(now.group.health)
        state, epoch, error = now.group.health[:3]
        assert (state, epoch) == ("rebuilding", 1) and error.startswith("start failed at stage")
        assert error.endswith(f"rank {rank}: its process died")
        await now.serving(1)
        assert now.launcher.replaced == [rank] and now.launcher.killed == 0
        await now.close()

    run(scenario())


def test_a_death_during_a_rebuild_leaves_a_process_that_starts_alone():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        started = asyncio.Event()

        def slow(process: FakeRank) -> None:
            """The process of rank 1 starts slowly, and rank 2 dies meanwhile."""
            if process.rank != 1:
                return
            describe = process.describe

            async def describe_later() -> dict[str, Any]:
                await started.wait()
                return await describe()

            process.describe = describe_later
            process.hang |= {"leave_epoch", "pulse"}
            now.launcher.handles[2].dead = True

        now.launcher.make = slow
        now.kill(1)
        await until(lambda: now.launcher.replaced == [1, 2])
        await asyncio.sleep(
            2 * STAGE_FACTOR * 0.1
        )  # longer than a process that has served may be silent
        now.ranks[1].hang.clear()
        started.set()
        await now.serving(2)
        assert now.launcher.replaced == [1, 2]
        await now.close()

    run(scenario())


def test_deaths_at_every_start_fail_the_group_with_the_rank():
    async def scenario() -> None:
        now = Scene(rebuild_attempts=0)
        now.ranks[2].fail["run_stage"] = ActorDiedError()
        await now.task
        error = "start failed at stage 'weights': rank 2: its process died"
        assert now.group.health[:3] == ("failed", 0, error) and now.launcher.killed == 1

    run(scenario())


def test_two_deaths_at_once_take_one_rebuild():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        now.kill(0)
        now.kill(2)
        await now.serving(1)
        assert now.launcher.replaced == [0, 2]
        await now.close()

    run(scenario())


@pytest.mark.parametrize("attempts", [0, 1, 3])
def test_failures_in_a_row_fail_the_group_with_their_reasons(attempts):
    async def scenario() -> None:
        now = Scene(rebuild_attempts=attempts)
        await now.serving(0)
        now.ranks[0].fail["run_stage"] = ValueError("model.safetensors is gone")
        now.kill(1)
        await now.task
        state, epoch, error = now.group.health[:3]
        assert (state, epoch, now.launcher.killed) == ("failed", attempts, 1)
        assert error.startswith("rank 1: its process died")
        failed = "rebuild failed at stage 'weights': model.safetensors is gone"
        assert error.count(failed) == attempts
        assert ("cluster.rebuild_attempts" in error) == bool(attempts)

    run(scenario())


def test_service_in_between_resets_the_count(monkeypatch):
    monkeypatch.setattr(group, "STABLE_S", 0.0)

    async def scenario() -> None:
        now = Scene(rebuild_attempts=1)
        for epoch in range(4):
            await now.serving(epoch)
            now.kill(epoch % 3)
        await now.serving(4)
        monkeypatch.setattr(group, "STABLE_S", 60.0)
        now.kill(0)
        await now.task
        assert now.group.health.state == "failed"
        assert "after 1 rebuilds in a row" in now.group.health.error

    run(scenario())


def test_a_stop_ends_a_rebuild():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        now.ranks[0].hang.add("run_stage")
        now.kill(1)
        await until(lambda: len(now.ranks[0].calls["run_stage"]) > 2)
        stopped = asyncio.create_task(now.group.stop())
        await stopped
        now.ranks[0].hang.clear()
        now.group._start_timeout_s = 0.05
        now.task.cancel()
        await asyncio.wait([now.task])
        assert now.group.health.state == "stopped" and now.launcher.killed == 1

    run(scenario())


def test_a_change_blames_no_rank_of_an_earlier_failure():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        now.ranks[2].ended.set_exception(RankFailedError("KeyError: 7"))
        await now.serving(1)
        assert now.group.members.failed == {2}
        await now.group.change(rank_config(2), "scaling to 2 ranks")
        assert now.group.members.failed == frozenset()
        await now.close()

    run(scenario())


def test_a_draining_group_drains_in_its_next_epoch():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        now.group.drain()
        now.kill(1)
        await until(lambda: now.group.health[:3] == ("draining", 1, ""))
        await now.close()

    run(scenario())
