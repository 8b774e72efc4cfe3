"""The actor shell of a rank without Ray: multicast refused, calls of other epochs refused, streams."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.host.cuda_environment import MULTICAST_OFF, MulticastError
from kernels.host.shm import PeerLeftError
from tests.unit.ray_fakes import rank_config, until
from workers.rank import actor
from workers.rank.actor import RankActor
from workers.rank.fence import StaleEpochError
from workers.rank.rank_info import RankInfo, Rendezvous
from workers.rank.step_loop import PeerFailedError, RankFailedError
from workers.step.step_sync import LockstepError
from workers.wire.request import RequestOutput
from workers.wire.secure_socket import StreamAddress


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "set_up_logging", lambda *_, **__: None)
    monkeypatch.setattr(actor, "node_address", lambda: "127.0.0.1")


@pytest.mark.parametrize("missing", sorted(MULTICAST_OFF))
def test_a_gpu_rank_refuses_to_start_with_multicast(monkeypatch, missing):
    for name, value in MULTICAST_OFF.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(MulticastError, match=f"{missing} is not set"):
        RankActor(0, rank_config(device="cuda"))


def test_a_gpu_rank_starts_without_multicast(monkeypatch):
    for name, value in MULTICAST_OFF.items():
        monkeypatch.setenv(name, value)
    subject = RankActor(0, rank_config(device="cuda"))
    subject._inbox.close()


ADDRESS = StreamAddress("tcp://127.0.0.1:9", b"0" * 40)
CALLS: dict[str, tuple[Any, ...]] = {
    "start": ([],),
    "done": (),
    "open_stream": ("i.1", ADDRESS, b"stream"),
    "close_stream": ("i.1",),
    "stop": (),
}


@pytest.mark.parametrize("method", CALLS)
def test_calls_of_another_epoch_are_refused(method):
    subject = RankActor(1, rank_config())
    subject._fence.join(3)
    with pytest.raises(StaleEpochError, match="rank 1 is in epoch 3, not 2"):
        asyncio.run(getattr(subject, method)(2, *CALLS[method]))
    subject._inbox.close()


def test_before_the_start_there_is_no_engine():
    subject = RankActor(0, rank_config())
    with pytest.raises(RankFailedError, match="not started"):
        asyncio.run(subject.stats())
    subject._inbox.close()


def test_a_rank_that_has_left_joins_no_earlier_epoch(monkeypatch):
    async def scenario() -> None:
        subject = RankActor(1, rank_config())
        joined = []
        monkeypatch.setattr(subject, "_join_group", lambda *args: joined.append(args[0].epoch))
        await subject.join_group(Rendezvous("127.0.0.1", 1, "a", 0), 1.0, (), 1, rank_config())
        with pytest.raises(StaleEpochError, match="in epoch 0, fenced from 0, not 0"):
            await subject.leave_epoch(0)
        await subject.leave_epoch(2)
        with pytest.raises(StaleEpochError, match="joins no epoch before 2, not 1"):
            await subject.join_group(Rendezvous("127.0.0.1", 1, "b", 1), 1.0, (), 1, rank_config())
        with pytest.raises(StaleEpochError, match="rank 1 is in epoch -1, not 0"):
            await subject.done(0)
        await subject.leave_epoch(3)  # an attempt in which it did not join
        with pytest.raises(StaleEpochError, match="fenced from 3, not 2"):
            await subject.leave_epoch(2)
        await subject.join_group(Rendezvous("127.0.0.1", 1, "c", 3), 1.0, (), 1, rank_config())
        assert joined == [0, 3]
        subject._inbox.close()

    asyncio.run(scenario())


def test_a_rank_that_waits_for_its_peers_leaves_early(monkeypatch):
    """A rank of a peer that has died waits in the join, for minutes if nothing ends it."""

    async def scenario() -> None:
        subject = RankActor(0, rank_config())

        def join(rendezvous: Rendezvous, *_: Any) -> None:
            if rendezvous.epoch == 0:
                assert subject._left.wait(20)
                raise ConnectionError("the store is closed")
            assert not subject._left.is_set()

        monkeypatch.setattr(subject, "_join_group", join)
        subject._store = object()
        joining = asyncio.create_task(
            subject.join_group(Rendezvous("127.0.0.1", 1, "a", 0), 300.0, (), 0, rank_config())
        )
        await asyncio.sleep(0.01)
        await subject.leave_epoch(1)
        assert subject._store is None, "peers in the join must fail too"
        with pytest.raises(ConnectionError):
            await joining
        await subject.join_group(Rendezvous("127.0.0.1", 1, "b", 1), 300.0, (), 0, rank_config())
        subject._inbox.close()

    asyncio.run(scenario())


def test_a_stage_ends_before_its_epoch_is_closed():
    async def scenario() -> None:
        subject = RankActor(0, rank_config())
        aborted, steps = threading.Event(), []

        class Current:
            def run_stage(self, name: str, progress: Any) -> None:
                assert aborted.wait(20)
                steps.append("stage ended")
                raise ConnectionError("aborted")

            def abort(self) -> None:
                aborted.set()

            def close(self) -> None:
                steps.append("closed")

        subject._current, subject._fence.epoch = Current(), 0
        stage = asyncio.create_task(subject.run_stage("weights"))
        await asyncio.sleep(0.01)
        await subject.leave_epoch(1)
        assert steps == ["stage ended", "closed"]
        with pytest.raises(ConnectionError):
            await stage
        subject._inbox.close()

    asyncio.run(scenario())


def test_a_rank_leaves_after_the_join_that_is_under_way(monkeypatch):
    async def scenario() -> None:
        subject = RankActor(1, rank_config())
        may_go, steps = threading.Event(), []

        def join(*_: Any) -> None:
            assert may_go.wait(60)
            steps.append("joined")

        monkeypatch.setattr(subject, "_join_group", join)
        monkeypatch.setattr(subject, "_close_epoch", lambda: steps.append("left"))
        joining = asyncio.create_task(
            subject.join_group(Rendezvous("127.0.0.1", 1, "a", 0), 1.0, (), 1, rank_config())
        )
        await asyncio.sleep(0.01)
        leaving = asyncio.create_task(subject.leave_epoch(1))
        await asyncio.sleep(0.01)
        assert not leaving.done() and steps == []
        may_go.set()
        await asyncio.gather(joining, leaving)
        assert steps == ["joined", "left"]
        subject._inbox.close()

    asyncio.run(scenario())


class FailedEpoch:
    """An epoch with an engine that runs until it is told to fail."""

    started = True

    def __init__(self, error: Exception | None = None) -> None:
        self.failures: list[BaseException] = []
        self.engine = SimpleNamespace(fail=self.failures.append, stats=self)
        self.may_end, self.error = threading.Event(), error
        self.closed = False

    def snapshot(self) -> dict[str, Any]:
        raise KeyError("steps")

    def start_engine(self, *_: Any) -> RankInfo:
        return RankInfo(0, {}, num_blocks=8, block_size=16, max_model_len=64)

    def run(self) -> None:
        assert self.may_end.wait(20)
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.may_end.set()

    def close(self) -> None:
        self.closed = True


def started(epoch: FailedEpoch) -> tuple[RankActor, Any]:
    subject = RankActor(0, rank_config())
    subject._current, subject._fence.epoch = epoch, 0
    return subject, subject.start(0, [])


def test_nothing_begins_in_an_epoch_that_was_left_during_the_start() -> None:
    """Its beats would go on in later epochs, with the number of the rank that the process had then."""

    class SlowStart(FailedEpoch):
        def start_engine(self, *_: Any) -> RankInfo:
            starting.set()
            assert self.may_end.wait(60)  # until the rank leaves
            return super().start_engine()

    async def scenario() -> None:
        epoch = SlowStart()
        subject, start = started(epoch)
        starts = asyncio.create_task(start)
        assert await asyncio.to_thread(starting.wait, 60)
        await subject.leave_epoch(1)
        with pytest.raises(StaleEpochError, match="in epoch -1, not 0"):
            await starts
        assert subject._tasks == () and subject._step_loop is None and epoch.closed
        subject._inbox.close()

    starting = threading.Event()
    asyncio.run(scenario())


def test_a_failed_log_of_statistics_fails_the_epoch() -> None:
    async def scenario() -> None:
        epoch = FailedEpoch()
        subject, start = started(epoch)
        await start
        await until(lambda: bool(epoch.failures))
        assert isinstance(epoch.failures[0], KeyError)
        await subject.leave_epoch(1)
        assert epoch.closed
        subject._inbox.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (None, None),
        (KeyError(7), RankFailedError),
        (PeerLeftError("rank 1 left"), PeerFailedError),
        (LockstepError("rank 1: failed"), PeerFailedError),
    ],
)
def test_the_end_of_the_step_loop_is_the_answer_of_done(
    error: Exception | None, kind: type[Exception] | None
) -> None:
    async def scenario() -> None:
        epoch = FailedEpoch(error)
        subject, start = started(epoch)
        await start
        assert (await subject.membership()).info is not None
        epoch.may_end.set()
        if kind is None:
            await subject.done(0)
            assert epoch.closed
        else:
            with pytest.raises(RankFailedError) as failure:
                await subject.done(0)
            assert type(failure.value) is kind and str(error) in str(failure.value)
        assert (await subject.membership()).info is None
        await subject.leave_epoch(1)
        subject._inbox.close()

    asyncio.run(scenario())


def test_the_tokens_of_a_rank_that_leaves_fail_nothing() -> None:
    """The step loop may publish between the moment in which the rank leaves its epoch and the end of the loop."""

    async def scenario() -> None:
        epoch = FailedEpoch()
        subject, start = started(epoch)
        await start
        subject._streams.open("i.1", ADDRESS, 0, b"stream".ljust(16))

        end = subject._step_loop.end

        def publish_and_end(current: FailedEpoch) -> None:
            subject._publish("i.1", [RequestOutput("a", [7])])
            end(current)

        subject._step_loop.end = publish_and_end
        await subject.leave_epoch(1)
        assert epoch.closed
        subject._inbox.close()

    asyncio.run(scenario())


def test_a_second_leave_may_come_while_the_first_one_closes_the_epoch() -> None:
    """A network that is back delivers both calls at once."""

    class Leaving(RankActor):
        @property
        def _current(self) -> Any:
            current, self._open = getattr(self, "_open", None), None
            return current

        @_current.setter
        def _current(self, epoch: Any) -> None:
            self._open = epoch

    subject, epoch = Leaving(0, rank_config()), FailedEpoch()
    subject._current = epoch
    try:
        subject._end_waits()
    finally:
        subject._inbox.close()
    assert epoch.may_end.is_set()
