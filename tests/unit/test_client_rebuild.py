"""The engine client while its group rebuilds: requests in flight go on, new requests wait, failures end them."""

import asyncio

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from cluster.client import group_client
from cluster.errors import EngineDeadError
from tests.unit.client_scene import PARAMS, OfFakes, run, scene, use_fakes
from tests.unit.ray_fakes import rank_config, until
from workers.sampling.no_token import ALL_FORBIDDEN, INVALID_LOGITS, error_of
from workers.wire.request import NO_OUTPUT, PoolingParams, RequestOutput


@pytest.fixture(autouse=True)
def rebuilding(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 3, "hang_timeout_s": 0.5})


def test_requests_go_on_in_the_next_epoch():
    """Each rank gets its open requests again, with the tokens that the ingress has; none is lost or doubled."""

    async def scenario() -> None:
        async with scene() as now:
            lives, dies = now.ask("a", rank=0), now.ask("b", rank=1, cache_salt="s", priority=2)
            waits = now.ask("c", rank=1)
            await now.ranks[0].emit("a", 0, 2)
            await now.ranks[1].emit("b", 0, 3)
            await until(lambda: (len(now.answers["a"]), len(now.answers["b"])) == (2, 3))
            await until(lambda: "c" in now.ranks[1].requests)
            old = now.group.lease_id
            await now.kill(1)
            await until(lambda: "b~2" in now.ranks[1].requests)
            assert now.supervisor.launcher.replaced == [1]
            again = now.ranks[1].requests["b~2"]
            assert again.emitted_token_ids == [100, 101, 102]
            assert (again.cache_salt, again.priority, again.params) == ("s", 2, PARAMS)
            await until(lambda: "a~2" in now.ranks[0].requests and "c~2" in now.ranks[1].requests)
            assert now.ranks[0].requests["a~2"].emitted_token_ids == [100, 101]
            await now.ranks[0].emit("a~2", 2, 1, finish=True)
            await now.ranks[1].emit("b~2", 3, 2, finish=True)
            await now.ranks[1].emit("c~2", 0, 1, finish=True)
            await asyncio.gather(lives, dies, waits)
            counts = {
                name: list(range(100, 100 + n)) for name, n in zip("abc", (3, 5, 1), strict=True)
            }
            assert now.answers == counts and now.outstanding == (0, 0)
            assert now.group.lease_id != old
            leases = now.supervisor._leases._leases
            await until(lambda: list(leases) == [now.group.lease_id])
            assert not now.ranks[0].aborted, "an epoch that has ended needs no abort"

    run(scenario())


def test_a_request_for_a_vector_is_submitted_again():
    """The vector of the next epoch reaches the client over the wire."""

    async def scenario() -> None:
        async with scene() as now:
            pooling = PoolingParams(rows="mean", dimensions=2, token_ids=(3,))
            outputs = now.client.generate("a", [1, 2], NO_OUTPUT, rank=1, pooling=pooling)
            answer = asyncio.ensure_future(anext(outputs))
            await until(lambda: "a" in now.ranks[1].requests)
            await now.kill(1)
            await until(lambda: "a~2" in now.ranks[1].requests)
            again = now.ranks[1].requests["a~2"]
            assert (again.pooling, again.params, again.emitted_token_ids) == (
                pooling,
                NO_OUTPUT,
                [],
            )
            vector = np.array([0.5, -1], dtype=np.float32)
            await now.ranks[1].send(RequestOutput("a~2", [], "stop", vector=vector))
            found = (await answer).vector
            assert found is not None and found.tolist() == [0.5, -1]
            await outputs.aclose()
            assert now.outstanding == (0, 0)

    run(scenario())


@pytest.mark.parametrize("cause", [ALL_FORBIDDEN, INVALID_LOGITS])
def test_a_request_that_ended_without_a_token_is_not_submitted_again(cause):
    """Neither is its rank replaced, and other requests of the rank go on."""

    async def scenario() -> None:
        async with scene() as now:
            ends, lives = now.ask("a", rank=1), now.ask("b", rank=1)
            await now.ranks[1].emit("b", 0, 1)
            await now.ranks[1].send(RequestOutput("a", [], "error", error_of(cause, 0)))
            await ends
            assert not now.supervisor.launcher.replaced and not lives.done()
            await now.kill(1)
            await until(lambda: "b~2" in now.ranks[1].requests)
            assert list(now.ranks[1].requests) == ["b~2"]
            await now.ranks[1].emit("b~2", 1, 1, finish=True)
            await lives
            assert now.answers == {"a": [], "b": [100, 101]} and now.outstanding == (0, 0)

    run(scenario())


def test_a_new_request_waits_for_the_rebuild():
    async def scenario() -> None:
        async with scene() as now:
            now.ranks[0].hang.add("leave_epoch")
            await now.kill(1)
            await until(lambda: not now.group.reachable)
            asked = now.ask("a", rank=1)
            assert now.client.health() == (True, "")
            await until(lambda: "a" in now.ranks[1].requests)
            assert now.supervisor.launcher.replaced == [0, 1]
            await now.ranks[1].emit("a", 0, 1, finish=True)
            await asked

    run(scenario())


@pytest.mark.parametrize("limit_s", [0, 0.05])
def test_a_new_request_is_refused_after_a_limit(limit_s, monkeypatch):
    async def scenario() -> None:
        async with scene(limits={"rebuild_wait_s": limit_s}) as now:
            now.ranks[0].hang.add("leave_epoch")
            await now.kill(1)
            await until(lambda: not now.group.reachable)
            with pytest.raises(
                EngineDeadError, match=r"\(serve.limits.rebuild_wait_s\): rank 1: its process died"
            ) as caught:
                await now.ask("a")
            assert caught.value.retry_after_s
            assert now.outstanding == (0, 0)

    # The rank that does not leave holds the rebuild up for the whole test.
    options = {"rebuild_attempts": 3, "hang_timeout_s": 60}
    monkeypatch.setattr(OfFakes, "group_options", options)
    run(scenario())


def test_a_client_that_leaves_during_a_rebuild_is_not_submitted_again():
    async def scenario() -> None:
        async with scene() as now:
            stays, leaves = now.ask("a", rank=0), now.ask("b", rank=0)
            await until(lambda: len(now.ranks[0].requests) == 2)
            now.ranks[0].hang.add("leave_epoch")
            await now.kill(1)
            await until(lambda: not now.group.reachable)
            leaves.cancel()
            await asyncio.wait([leaves])
            await until(lambda: "a~2" in now.ranks[0].requests)
            assert list(now.ranks[0].requests) == ["a~2"]
            await now.ranks[0].emit("a~2", 0, 1, finish=True)
            await stays
            assert now.outstanding == (0, 0)

    run(scenario())


def test_a_rebuild_that_fails_ends_every_request_with_its_reason():
    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=0)
            await until(lambda: "a" in now.ranks[0].requests)
            now.ranks[0].fail["run_stage"] = ValueError("the weights are gone")
            await now.kill(1)
            with pytest.raises(EngineDeadError, match="the weights are gone"):
                await asked
            with pytest.raises(EngineDeadError, match="the weights are gone"):
                await now.ask("b")
            assert now.outstanding == (0, 0)

    run(scenario())


def test_a_rank_that_cannot_be_reached_is_tried_again(monkeypatch):
    """Between the end of a rebuild and the opening of the streams a rank may refuse."""
    monkeypatch.setattr(group_client, "RETRY_S", 0.01)

    async def scenario() -> None:
        async with scene() as now:
            asked = now.ask("a", rank=0)
            await until(lambda: "a" in now.ranks[0].requests)
            now.ranks[0].fail["open_stream"] = ActorDiedError()
            await now.kill(1)
            await until(lambda: len(now.ranks[0].calls["open_stream"]) > 3)
            now.ranks[0].fail.clear()
            await until(lambda: any(name.startswith("a~") for name in list(now.ranks[0].requests)))
            (name,) = now.ranks[0].requests
            await now.ranks[0].emit(name, 0, 1, finish=True)
            await asked

    run(scenario())


def test_requests_go_on_with_another_number_of_ranks():
    """The loads of the ranks are counted anew; a chosen rank that has left is replaced by any other."""

    async def scenario() -> None:
        async with scene() as now:
            (subject,) = now.supervisor._pool.groups
            first, second = now.ask("a", rank=0), now.ask("b", rank=1)
            await now.ranks[1].emit("b", 0, 2)
            await until(lambda: len(now.answers["b"]) == 2 and "a" in now.ranks[0].requests)
            await subject.change(rank_config(3), "scale to 3 ranks")
            await until(lambda: now.client.num_ranks == 3)
            await until(lambda: "b~2" in now.ranks[1].requests)
            assert now.outstanding[2] == 0 and all(now.outstanding[:2])
            third = now.ask("c", rank=2)
            await until(lambda: "c" in now.ranks[2].requests)
            await subject.change(rank_config(1), "scale to 1 rank")
            names = {"a~3", "b~3", "c~2"}
            await until(lambda: set(now.ranks[0].requests) == names)
            assert now.client.num_ranks == 1 and len(now.outstanding) == 1
            await now.ranks[0].emit("a~3", 0, 1, finish=True)
            await now.ranks[0].emit("b~3", 2, 2, finish=True)
            await now.ranks[0].emit("c~2", 0, 1, finish=True)
            await asyncio.gather(first, second, third)
            assert now.answers["b"] == [100, 101, 102, 103]
            assert now.outstanding == (0,)

    run(scenario())
