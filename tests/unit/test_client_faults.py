"""The engine client where descriptors run out, causes coincide, and the supervisor dies with its ranks."""

import asyncio
import errno
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.client import engine_client, group_client, group_streams
from cluster.errors import EngineDeadError
from cluster.supervisor.saved_state import PoolState
from tests.unit.client_scene import PARAMS, OfFakes, Scene, end_tasks, run, scene, use_fakes
from tests.unit.ray_fakes import FakeHandle, phalanx_config, until


@pytest.fixture(autouse=True)
def rebuilding(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 3, "hang_timeout_s": 0.5})
    monkeypatch.setattr(group_client, "RETRY_S", 0.01)


async def finish(now: Scene, rank: int, name: str) -> None:
    """The rank sends the next token of a request, its last one."""
    have = len(now.answers[name.split("~")[0]])
    await until(lambda: name in now.ranks[rank].requests)
    await now.ranks[rank].emit(name, have, 1, finish=True)


@pytest.mark.parametrize("name", ["TokenReceiver", "InboxSender"])
def test_streams_are_opened_when_descriptors_are_free_again(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One EMFILE ended the task that follows the groups: the ingress stayed green, and answered nothing."""
    failures = 3
    made = getattr(group_streams, name)

    def fails(*args: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(errno.EMFILE, "no descriptor is free")
        return made(*args)

    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=0)
            await until(lambda: "a" in now.ranks[0].requests)
            monkeypatch.setattr(group_streams, name, fails)
            await now.kill(1)
            await finish(now, 0, "a~2")
            await asked
            assert now.answers["a"] == [100] and failures < 0 and now.client.health() == (True, "")

    run(scenario())


def test_an_expired_lease_and_a_new_epoch_submit_a_request_once() -> None:
    """The lease's renewal got the ranks of the new epoch, and opened streams there beside the rebuild's."""

    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=0)
            await until(lambda: "a" in now.ranks[0].requests)
            register, may_register = now.supervisor.register, asyncio.Event()
            waits: list[bool] = []

            async def waiting(*args: Any) -> Any:
                waits.append(True)
                await may_register.wait()
                return await register(*args)

            now.supervisor.register = waiting
            now.expire_leases()
            await until(lambda: bool(waits))
            await now.kill(1)
            group = now.supervisor._pool.groups[0]
            await until(lambda: group.health[:3] == ("serving", 1, ""))
            await until(lambda: now.group.health.epoch == 1)
            may_register.set()
            await until(lambda: now.group.reachable)
            await until(lambda: "a~2" in now.ranks[0].requests)
            for _ in range(20):  # heartbeats
                await asyncio.sleep(engine_client.HEARTBEAT_S / 4)
            assert list(now.ranks[0].requests) == ["a~2"], "the request runs once"
            assert len(waits) == 1
            await finish(now, 0, "a~2")
            await asked

    run(scenario())


def test_a_request_whose_last_token_has_come_is_no_failure() -> None:
    async def scenario() -> None:
        async with scene() as now:
            done, open_ = now.client.generate("a", [1], PARAMS, rank=0), now.ask("b", rank=0)
            first = asyncio.create_task(anext(done))
            await now.ranks[0].emit("a", 0, 1)
            await first
            await now.ranks[0].emit("a", 1, 1, finish=True)
            await until(lambda: now.group.open["a"].finished)
            now.ranks[0].fail["run_stage"] = ValueError("the weights are gone")
            await now.kill(1)
            with pytest.raises(EngineDeadError, match="the weights are gone"):
                await open_
            last = await anext(done)
            assert (last.token_ids, last.finish_reason) == ([101], "length")
            with pytest.raises(StopAsyncIteration):
                await anext(done)
            assert now.outstanding == (0, 0)

    run(scenario())


class RestartedHandle(FakeHandle):
    """A handle of an actor that Ray restarts: a call without an answer is sent again to the next process."""

    def __init__(self, target: Any):
        super().__init__(target)
        self._restarted = asyncio.Event()

    def restart(self, target: Any) -> None:
        self.target = target
        self._restarted.set()
        self._restarted = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        handle = self

        class Method:
            def remote(self, *args: Any) -> asyncio.Future:
                return asyncio.ensure_future(handle._call(name, args))

        return Method()

    async def _call(self, name: str, args: tuple) -> Any:
        while True:
            call = asyncio.ensure_future(getattr(self.target, name)(*args))
            restarted = asyncio.ensure_future(self._restarted.wait())
            await asyncio.wait([call, restarted], return_when=asyncio.FIRST_COMPLETED)
            restarted.cancel()
            if call.done():
                return call.result()
            call.cancel()


def test_requests_outlive_a_supervisor_that_dies_with_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next supervisor started at epoch 0 again, so that the ingress took the new ranks for those of before."""
    monkeypatch.setattr("tests.unit.client_scene.FakeHandle", RestartedHandle)

    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=0)
            await until(lambda: "a" in now.ranks[0].requests)
            await now.ranks[0].emit("a", 0, 1)
            await until(lambda: now.answers["a"] == [100])
            first = now.supervisor
            assert first._state.of("app").epoch == 0, "kept as the epoch begins"
            await end_tasks(first)
            first.launcher.kill()
            for rank in first.launcher.ranks:
                rank.close()
            successor = OfFakes(phalanx_config())
            found, successor.launcher.all = successor.launcher.all, []  # no rank is found
            run_tasks = successor._run

            def start_ranks() -> None:
                successor.launcher.all = found
                run_tasks()

            successor._run = start_ranks
            await successor.recover(PoolState(first._state.groups.copy()))
            assert successor._pool.groups[0].health[:3] == ("starting", 1, "")
            now.supervisor = successor
            now.handle.restart(successor)
            await finish(now, 0, "a~2")
            await asked
            assert now.answers["a"] == [100, 101] and now.group.epoch == 1
            await end_tasks(successor)
            for rank in successor.launcher.ranks:
                rank.close()

    run(scenario())


def test_ranks_of_a_group_that_does_not_serve_are_given_to_no_ingress() -> None:
    async def scenario() -> None:
        subject = OfFakes(phalanx_config())
        assert await subject.register("a", 0) is None, "it has no ranks yet"
        await subject.start(phalanx_config())
        group = subject._pool.groups[0]
        await until(lambda: group.health.state == "serving")
        assert (await subject.register("a", 0)).members.infos
        await until(lambda: bool(subject.fake_ranks[0].calls["done"]))
        subject.launcher.make = lambda rank: rank.hang.add("describe")
        subject.launcher.handles[0].dead = True
        subject.fake_ranks[0].ended.set_exception(ActorDiedError())
        await until(lambda: group.health.state == "rebuilding")
        assert await subject.register("a", 0) is None
        await end_tasks(subject)

    run(scenario())
