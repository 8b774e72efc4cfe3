"""The engine client over fake ranks and real sockets: streams, loads, lost leases, failures, the stop."""

import asyncio
import logging

import pytest
from ray.exceptions import ActorDiedError

from cluster.client import group_streams
from cluster.client.engine_client import EngineClient
from cluster.errors import EngineDeadError
from cluster.supervisor import actor
from tests.unit.client_scene import PARAMS, OfFakes, end_tasks, run, scene, use_fakes
from tests.unit.ray_fakes import FakeHandle, phalanx_config, until


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)


def test_tokens_arrive_and_their_load_is_released(monkeypatch):
    async def scenario() -> None:
        async with scene() as now:
            assert now.client.health() == (True, "")
            assert (now.client.max_model_len, now.client.max_request_tokens) == (64, 8 * 16)
            asked = now.ask("a", rank=1)
            await until(lambda: "a" in now.ranks[1].requests)
            assert now.outstanding_prefill == (0, 3)
            await now.ranks[1].emit("a", 0, 2)
            await until(lambda: now.answers["a"] == [100, 101])
            assert now.outstanding == (0, 3 + 8) and not asked.done()
            assert now.outstanding_prefill == (0, 0)
            await now.ranks[1].emit("a", 2, 1, finish=True)
            await asked
            assert now.answers["a"] == [100, 101, 102] and now.outstanding == (0, 0)
            assert not now.ranks[1].aborted
            assert await now.client.rank_stats() == [{"rank": 0}, {"rank": 1}]
            now.ranks[0].hang.add("stats")
            silent = {"rank": 0, "silent": True}
            assert await now.client.rank_stats() == [silent, {"rank": 1}]

    monkeypatch.setattr(group_streams, "STATS_S", 0.5)
    run(scenario())


def test_a_client_that_leaves_aborts_and_releases():
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=0)
            await now.ranks[0].emit("a", 0, 1)
            await until(lambda: now.answers["a"] == [100])
            asked.cancel()
            await asyncio.wait([asked])
            await until(lambda: now.ranks[0].aborted == ["a"])
            assert now.outstanding == (0, 0)

    run(scenario())


def test_requests_go_to_the_idle_rank():
    async def scenario() -> None:
        async with scene() as now:
            asked = [now.ask(name) for name in ("a", "b")]
            await until(lambda: len(now.ranks[0].requests) == len(now.ranks[1].requests) == 1)
            for rank in now.ranks:
                (name,) = rank.requests
                await rank.emit(name, 0, 1, finish=True)
            await asyncio.gather(*asked)
            assert now.outstanding == (0, 0)

    run(scenario())


def test_a_lost_lease_costs_no_token(caplog):
    """The streams of an ingress that stalled are opened again; its requests go on where they were."""

    async def scenario() -> None:
        async with scene() as now:
            asked, fresh = now.ask("a", rank=0), now.ask("b", rank=1, cache_salt="s", priority=2)
            await now.ranks[0].emit("a", 0, 3)
            await until(lambda: now.answers["a"] == [100, 101, 102])
            await until(lambda: "b" in now.ranks[1].requests)
            old = now.group.lease_id
            now.expire_leases()
            await until(lambda: "a~2" in now.ranks[0].requests)
            await until(lambda: "b~2" in now.ranks[1].requests)
            again = now.ranks[0].requests["a~2"]
            assert again.emitted_token_ids == [100, 101, 102]
            assert again.ingress_id == now.group.lease_id != old
            other = now.ranks[1].requests["b~2"]
            assert (other.cache_salt, other.priority, other.emitted_token_ids) == ("s", 2, [])
            assert now.outstanding == (11, 11) and now.outstanding_prefill == (3, 3)
            await now.ranks[0].emit("a~2", 3, 2, finish=True)
            await now.ranks[1].emit("b~2", 0, 1, finish=True)
            await asyncio.gather(asked, fresh)
            assert now.answers == {"a": [100, 101, 102, 103, 104], "b": [100]}
            assert now.outstanding == now.outstanding_prefill == (0, 0)
            assert now.client.health() == (True, "")
            later = now.ask("c", rank=1)
            await now.ranks[1].emit("c", 0, 1, finish=True)
            await later

    run(scenario())
    assert "a lease of this ingress has expired" in caplog.text


def test_a_request_that_ended_during_the_stall_is_not_run_again():
    async def scenario() -> None:
        async with scene() as now:
            generator = now.client.generate("a", [1, 2, 3], PARAMS, rank=0)
            first = asyncio.create_task(anext(generator))
            await now.ranks[0].emit("a", 0, 1)
            await first
            await now.ranks[0].emit("a", 1, 1, finish=True)
            await until(lambda: now.group.open["a"].finished)
            old = now.group.lease_id
            now.expire_leases()
            await until(lambda: now.group.lease_id != old)
            assert (await anext(generator)).token_ids == [101]
            with pytest.raises(StopAsyncIteration):
                await anext(generator)
            assert not now.ranks[0].requests and now.outstanding == (0, 0)

    run(scenario())


def test_a_failed_group_ends_every_request_with_its_reason(caplog):
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=0)
            await until(lambda: "a" in now.ranks[0].requests)
            await until(lambda: bool(now.ranks[1].calls["done"]))
            now.ranks[1].ended.set_exception(ActorDiedError())
            with pytest.raises(EngineDeadError, match="rank 1: its process died"):
                await asked
            assert now.client.health() == (False, "rank 1: its process died")
            assert now.outstanding == now.outstanding_prefill == (0, 0)
            with pytest.raises(EngineDeadError, match="rank 1"):
                await now.ask("b")
            with pytest.raises(EngineDeadError, match="rank 1"):
                await now.client.rank_stats()

    run(scenario())
    assert [r.levelname for r in caplog.records if "the group failed" in r.message] == ["ERROR"]


def test_a_supervisor_that_is_gone_is_noticed():
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=0)
            await until(lambda: "a" in now.ranks[0].requests)
            now.handle.dead = True
            now.supervisor._pool.groups[0]._set_state("draining")  # lets the pending call return
            with pytest.raises(EngineDeadError, match="the supervisor is gone: ActorDiedError"):
                await asked
            with pytest.raises(EngineDeadError, match="the supervisor does not answer"):
                await now.client.ingress_metrics({})

    run(scenario())


def test_a_plain_stop_is_no_error(caplog):
    caplog.set_level(logging.DEBUG, logger="cluster")

    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=0)
            await until(lambda: "a" in now.ranks[0].requests)
            draining = asyncio.create_task(now.client.drain_requested())
            await now.supervisor.drain(3.0)
            assert await draining == 3.0
            await asyncio.sleep(0.05)
            assert now.client.health() == (True, ""), "requests in flight go on"
            stop = asyncio.create_task(now.supervisor.stop())
            with pytest.raises(EngineDeadError, match="the server is stopping"):
                await asked
            for rank in now.ranks:
                rank.ended.set_result(None)
            await stop
            await now.client.report_drained()

    run(scenario())
    ours = [record for record in caplog.records if record.name.startswith("cluster.")]
    assert not [record for record in ours if record.levelno >= logging.WARNING]


def test_a_start_that_fails_is_told_with_its_reason():
    async def scenario() -> None:
        subject = OfFakes(phalanx_config())
        subject.fake_ranks[1].fail["run_stage"] = ValueError("model.safetensors is cut")
        actor.get_or_create = lambda config: FakeHandle(subject)
        client = EngineClient(phalanx_config())
        with pytest.raises(EngineDeadError, match=r"stage 'weights': model.safetensors is cut"):
            await client.connect()
        assert client.health() == (False, "the ranks are starting")
        await client.close()
        await end_tasks(subject)

    run(scenario())


def test_the_lease_is_given_back():
    async def scenario() -> None:
        async with scene() as now:
            lease = now.group.lease_id
            assert now.supervisor._leases.of_group(0) == {lease}
        assert not now.supervisor._leases.ingress_ids
        assert now.ranks[0].calls["close_stream"] == [(0, lease)]

    run(scenario())
