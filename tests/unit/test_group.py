"""A group's life over fake ranks: the stages of its start, its failures, its end, the epoch in every call."""

import asyncio
import re
from collections.abc import Awaitable
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.supervisor import failures, group
from cluster.supervisor.failures import failure_message
from kernels.interface.registry import SEAMS, backend_class
from tests.unit.ray_fakes import FakeLauncher, FakeRank, fake_group, group_spec, until
from workers.rank.step_loop import PeerFailedError, RankFailedError
from workers.stats.versions import rank_versions


def run(coroutine: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await coroutine

    return asyncio.run(bounded())


def remote(error: Exception) -> RayTaskError:
    """An error as Ray raises it at the caller."""
    return RayTaskError("method", "traceback", error).as_instanceof_cause()


def test_the_start_of_a_group():
    subject, ranks, _ = fake_group(3)
    run(subject.start())
    status = subject.status
    assert subject.health[:3] == ("serving", 0, "")
    names = [name for name, _ in status.stages]
    assert names == ["placement", "processes", "group", "weights", "KV cache", "engines"]
    assert all(seconds >= 0 for _, seconds in status.stages)
    assert [info.rank for info in status.infos] == [0, 1, 2]
    assert len(ranks[0].calls["host_rendezvous"]) == 1 and not ranks[1].calls["host_rendezvous"]
    for rank in ranks:
        ((rendezvous, timeout_s, gpus, *_),) = rank.calls["join_group"]
        assert (rendezvous.port, rendezvous.epoch, timeout_s, gpus) == (1234, 0, 5.0, ())
        ((epoch, peers),) = rank.calls["start"]
        others = [f"inbox {other.rank}" for other in ranks if other is not rank]
        assert epoch == 0 and [peer.endpoint for peer in peers] == others
    meetings = {rank.calls["join_group"][0][0] for rank in ranks}
    assert len(meetings) == 1 and all(len(meeting.secret) == 32 for meeting in meetings)
    assert all(re.fullmatch("app-0-[0-9a-f]{32}", meeting.name) for meeting in meetings)


def test_ranks_of_different_versions_form_no_group():
    subject, ranks, launcher = fake_group()
    ranks[1].versions = {"phalanx": "1.0", "torch": "2.1"}
    run(subject.start())
    state, _, error = subject.health[:3]
    assert state == "failed" and launcher.killed == 1
    assert "start failed at stage 'processes': ranks were started with different versions" in error
    assert error.splitlines()[1:] == ["  torch: rank 0 has '2.0', rank 1 has '2.1'"]
    assert not ranks[0].calls["join_group"]


def test_the_versions_of_a_rank_cover_every_backend():
    found = rank_versions()
    assert "sources" in found["phalanx"] and found["torch"] == torch.__version__
    for seam, names in SEAMS.items():
        for name in names:
            assert set(backend_class(seam, name).distributions) <= found.keys()


def test_locations_carry_the_addresses_of_the_nodes():
    ranks = [FakeRank(0, "fd00::1"), FakeRank(1, "fd00::1")]
    subject = group.Group(group_spec(2), FakeLauncher(ranks), start_timeout_s=5.0)
    run(subject.start())
    assert [location.address for location in subject.status.locations] == ["fd00::1", "fd00::1"]
    assert ranks[1].calls["join_group"][0][0].host == "fd00::1"


def test_progress_of_a_stage_is_that_of_all_ranks():
    async def scenario() -> None:
        subject, ranks, _ = fake_group()
        ranks[0].hang.add("run_stage")
        start = asyncio.create_task(subject.start())
        await until(lambda: subject.status.stage == "weights")
        assert (await subject.refreshed_status()).progress == (1 + 2, 4 + 4)
        ranks[1].fail["progress"] = RankFailedError("busy")
        assert (await subject.refreshed_status()).progress == (1, 4)
        start.cancel()

    run(scenario())


def test_a_failed_stage_fails_the_group():
    subject, ranks, launcher = fake_group()
    ranks[1].fail["run_stage"] = remote(ValueError("model.safetensors is cut"))
    run(subject.start())
    error = "start failed at stage 'weights': model.safetensors is cut"
    assert subject.health[:3] == ("failed", 0, error) and launcher.killed == 1


def test_a_group_without_room_fails():
    subject, _, launcher = fake_group()
    launcher.error = ValueError("no room for 2 ranks")
    run(subject.start())
    assert subject.health.error == "start failed at stage 'placement': no room for 2 ranks"


def test_a_stage_that_takes_too_long_names_the_setting():
    ranks = [FakeRank(0)]
    ranks[0].hang.add("run_stage")
    subject = group.Group(group_spec(1), FakeLauncher(ranks), start_timeout_s=0.05)
    run(subject.start())
    assert "cluster.start_timeout_s allows more" in subject.health.error


def test_a_time_limit_of_a_rank_is_not_that_of_the_stage():
    subject, ranks, _ = fake_group()
    ranks[1].fail["run_stage"] = remote(TimeoutError("rank 0 did not vote within 2 s"))
    run(subject.start())
    assert subject.health.error.endswith("'weights': TimeoutError: rank 0 did not vote within 2 s")


def test_without_rebuilds_a_dead_rank_fails_the_group():
    async def scenario() -> None:
        subject, ranks, launcher = fake_group()
        await subject.start()
        seen = subject.health
        news = asyncio.create_task(subject.changed(seen))
        ended = asyncio.create_task(subject.watch())
        await until(lambda: ranks[1].calls["done"] == [(0,)])
        assert not news.done()
        ranks[1].ended.set_exception(ActorDiedError())
        assert await ended == "rank 1: its process died"
        await subject._rebuild("rank 1: its process died")
        await news
        assert subject.health[:3] == ("failed", 0, "rank 1: its process died")
        assert launcher.killed == 1

    run(scenario())


def test_the_rank_that_lost_a_peer_is_not_the_cause(monkeypatch):
    async def end(wait_s: float, *ends: tuple[int, Exception]) -> str:
        monkeypatch.setattr(failures, "ROOT_CAUSE_WAIT_S", wait_s)
        subject, ranks, _ = fake_group(3)
        await subject.start()
        watch = asyncio.create_task(subject.watch())
        await until(lambda: all(rank.calls["done"] for rank in ranks))
        for rank, error in ends:
            ranks[rank].ended.set_exception(error)
            await asyncio.sleep(0.01)
        return await watch

    lost = remote(PeerFailedError("LockstepError: rank 2 did not vote"))
    died, failed = ActorDiedError(), remote(RankFailedError("KeyError: 7"))
    assert run(end(60.0, (0, lost), (1, lost), (2, died))) == "rank 2: its process died"
    assert run(end(0.02, (1, lost))) == "rank 1: LockstepError: rank 2 did not vote"
    assert run(end(60.0, (0, lost), (1, failed))) == "rank 1: KeyError: 7"


def test_a_pause_of_the_supervisor_does_not_hide_the_cause():
    """All time limits have passed as its loop goes on, and the answer of the rank that died is read after them."""

    async def scenario() -> None:
        loop, now = asyncio.get_running_loop(), 0.0
        loop.time = lambda: now  # type: ignore[method-assign]
        lost, died = loop.create_future(), loop.create_future()
        first = asyncio.create_task(failures.first_failure([lost, died]))
        lost.set_exception(PeerFailedError("rank 1 left"))
        for _ in range(10):  # the time limit runs
            await asyncio.sleep(0)
        now = 1000.0
        for _ in range(10):  # it has passed, and the loop takes another look
            await asyncio.sleep(0)
        assert not first.done()
        died.set_exception(ActorDiedError())
        assert await first is died

    asyncio.run(scenario())


@pytest.mark.parametrize("ends_on_stop", [True, False])
def test_a_stop_is_no_failure(monkeypatch, caplog, ends_on_stop):
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 60.0 if ends_on_stop else 0.05)

    async def scenario() -> None:
        subject, ranks, launcher = fake_group()
        await subject.start()
        watch = asyncio.create_task(subject.watch())
        await until(lambda: all(rank.calls["done"] for rank in ranks))
        stop = asyncio.create_task(subject.stop())
        await until(lambda: bool(ranks[0].calls["stop"]))
        assert subject.health[:3] == ("stopped", 0, "the server is stopping")
        if ends_on_stop:
            for rank in ranks:
                rank.ended.set_result(None)
        await stop
        await watch
        assert ranks[0].calls["stop"] == [(0,)] and not ranks[1].calls["stop"]
        assert subject.health.state == "stopped" and launcher.killed == 1

    run(scenario())
    ours = [record for record in caplog.records if record.name.startswith("cluster.")]
    assert bool(ours) != ends_on_stop, "asyncio may log what tests before this one have left"


def test_a_stop_ends_a_start():
    async def scenario() -> None:
        subject, ranks, launcher = fake_group()
        ranks[1].hang.add("run_stage")
        start = asyncio.create_task(subject.start())
        await until(lambda: bool(ranks[1].calls["run_stage"]))
        await subject.stop()
        start.cancel()
        await asyncio.wait([start])
        assert subject.health.state == "stopped" and launcher.killed == 1
        assert not ranks[0].calls["stop"], "a loop that never ran cannot stop"

    run(scenario())


def test_streams_close_in_the_epoch_that_opened_them():
    async def scenario() -> None:
        subject, ranks, _ = fake_group()
        await subject.start()
        subject.status.epoch = 7
        for rank in ranks:
            rank.fail["close_stream"] = RankFailedError("it has ended")
        subject.close_stream("ingress-1.1")
        await until(lambda: bool(ranks[1].calls["close_stream"]))
        assert ranks[0].calls["close_stream"] == [(7, "ingress-1.1")]

    run(scenario())


def test_draining_is_alive_and_only_follows_serving():
    subject, _, _ = fake_group()
    subject.drain()
    assert subject.health.state == "starting"
    run(subject.start())
    subject.drain()
    assert subject.health.state == "draining" and subject.health.alive


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (remote(ValueError("too large")), "too large"),
        (remote(KeyError("x")), "KeyError: 'x'"),
        (ActorDiedError(), "its process died"),
        (RankFailedError("out of blocks"), "out of blocks"),
    ],
)
def test_messages_are_without_rays_traceback(error, message):
    assert failure_message(error) == message
