"""Faults of the network between an ingress and its ranks: no token is lost or doubled, no request and no end is lost.

The ingress's client and the ranks' ends are those of production; each connection leads through a proxy.
"""

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from cluster.client import group_streams, stream_watch
from cluster.client.group_streams import GroupStreams
from tests.unit import ray_fakes
from tests.unit.client_scene import Scene, run, scene, use_fakes
from tests.unit.ray_fakes import FakeRank, until
from tests.unit.tcp_proxy import BACK, FORWARD, Proxy
from tests.unit.test_awake import Clock
from workers.rank import token_streams
from workers.wire import secure_socket
from workers.wire.request import RequestOutput
from workers.wire.secure_socket import StreamAddress
from workers.wire.token_stream import TokenReceiver

LEAST_TOKENS = 8


class FarRank(FakeRank):
    """A rank behind proxies, with beats and steps. `tokens` leads to the ingress, `inbox_way` to the rank's inbox.

    Requests end once `may_end` is set.
    """

    def __init__(self, rank: int, address: str = "127.0.0.1"):
        super().__init__(rank, address)
        self.proxies: list[Proxy] = []
        self.beats: asyncio.Task[None] | None = None
        self.may_end = True
        self._sent: dict[str, int] = {}

    async def open_stream(
        self, epoch: int, lease_id: str, address: StreamAddress, stream: bytes
    ) -> Any:
        self.tokens = Proxy(address)
        inbox = await super().open_stream(epoch, lease_id, await self.tokens.start(), stream)
        self.inbox_way = Proxy(inbox)
        self.proxies += self.tokens, self.inbox_way
        if self.beats is None:
            self.beats = asyncio.create_task(self.streams.beat(self.rank))
        return await self.inbox_way.start()

    def step(self) -> None:
        """Send one token of each open request, as a step loop does."""
        for request_id, request in list(self.requests.items()):
            number = self._sent.get(request_id, len(request.emitted_token_ids))
            self._sent[request_id] = number + 1
            ends = self.may_end and number + 1 >= LEAST_TOKENS
            if ends:
                del self.requests[request_id]
            output = RequestOutput(request_id, [100 + number], "length" if ends else None)
            self.send_now(request.ingress_id, [output])

    @property
    def num_openings(self) -> int:
        return len(self.calls["open_stream"])


@pytest.fixture(autouse=True)
def far_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(ray_fakes, "FakeRank", FarRank)
    monkeypatch.setattr(token_streams, "BEAT_S", 0.05)
    monkeypatch.setattr(stream_watch, "BEAT_S", 0.05)
    monkeypatch.setattr(secure_socket, "PING_MS", 200)


@asynccontextmanager
async def far_scene() -> AsyncIterator[Scene]:
    """A scene with ranks that step all the time."""

    async def step() -> None:
        while True:
            for rank in now.ranks:
                rank.step()
            await asyncio.sleep(0.002)

    async with scene() as now:
        steps = asyncio.create_task(step())
        try:
            yield now
            assert not steps.done()
        finally:
            for task in (steps, *(rank.beats for rank in now.ranks)):
                task.cancel()
            for rank in now.ranks:
                for proxy in rank.proxies:
                    await proxy.close()


async def whole(now: Scene, asked: "list[asyncio.Task[None]]") -> None:
    """Wait for the end of all requests, and check their tokens."""
    await asyncio.gather(*asked)
    assert len(now.answers) == len(asked)
    for name, tokens in now.answers.items():
        assert len(tokens) >= LEAST_TOKENS, name
        assert tokens == list(range(100, 100 + len(tokens))), name
    assert now.outstanding == now.outstanding_prefill == (0, 0)


def test_without_a_fault_no_stream_is_opened_again(monkeypatch) -> None:
    async def scenario() -> None:
        async with far_scene() as now:
            await whole(now, [now.ask(f"r{number}") for number in range(8)])
            await asyncio.sleep(0.5)  # idle: beats alone
            assert [rank.num_openings for rank in now.ranks] == [1, 1]

    monkeypatch.setattr(stream_watch, "ARRIVAL_BEATS", 100)  # a busy machine is no fault
    run(scenario())


async def reset_under_load(now: Scene, rank: FarRank, may_end: bool) -> None:
    """Lose what the proxy holds with its connection, and wait for the next one."""
    before, openings = (
        {name: len(tokens) for name, tokens in now.answers.items()},
        rank.num_openings,
    )
    await until(lambda: all(len(now.answers[name]) > num for name, num in before.items()))
    rank.tokens.stall()
    rank.may_end = may_end
    await until(lambda: rank.tokens.num_held[FORWARD] > 1000)
    rank.tokens.reset()
    rank.tokens.flow()
    await until(lambda: rank.num_openings > openings)


def test_three_resets_of_a_stalled_stream_lose_and_double_no_token(caplog) -> None:
    """What the proxy holds is lost with the connection: tokens, and with the last reset the ends of requests."""

    async def scenario() -> None:
        async with far_scene() as now:
            rank = now.ranks[0]
            rank.may_end = False
            asked = [now.ask(f"r{number}", rank=0) for number in range(20)]
            for last in (False, False, True):
                await reset_under_load(now, rank, last)
            await whole(now, asked)
            assert now.ranks[1].num_openings == 1

    run(scenario())
    assert "the stream of rank 0 is opened again" in caplog.text


@pytest.mark.parametrize("later", [False, True], ids=["last message", "later message"])
def test_a_request_lost_on_its_way_is_submitted_again(monkeypatch, caplog, later) -> None:
    async def scenario() -> None:
        async with far_scene() as now:
            rank = now.ranks[0]
            rank.may_end = False
            asked = [now.ask("before", rank=0)]
            await until(lambda: bool(now.answers["before"]))
            proxy = rank.inbox_way
            proxy.stall()
            asked.append(now.ask("lost", rank=0))
            await until(lambda: proxy.num_held[FORWARD] > 0)
            proxy.reset()
            proxy.flow()
            if later:
                await until(lambda: proxy.num_connections >= 2)
                asked.append(now.ask("later", rank=0))
            rank.may_end = True
            await whole(now, asked)

    if later:
        monkeypatch.setattr(stream_watch, "ARRIVAL_BEATS", 100)
    run(scenario())
    reason = "the rank misses a message" if later else "messages of this ingress have arrived"
    assert reason in caplog.text


@pytest.mark.parametrize("way", ["tokens", "inbox_way"])
def test_a_flow_that_a_firewall_has_dropped_is_noticed(monkeypatch, way) -> None:
    """Neither side gets an end of the connection, which here is noticed after 0.7 s, not after 7 s."""

    async def scenario() -> None:
        async with far_scene() as now:
            rank = now.ranks[0]
            rank.may_end = False
            asked = [now.ask("a", rank=0)]
            await until(lambda: bool(now.answers["a"]))
            proxy: Proxy = getattr(rank, way)
            proxy.drop()
            rank.may_end = True
            asked.append(now.ask("b", rank=0))
            await until(lambda: proxy.num_connections > 1 or rank.num_openings > 1)
            await whole(now, asked)

    monkeypatch.setattr(secure_socket, "ANSWER_MS", 500)
    monkeypatch.setattr(stream_watch, "ARRIVAL_BEATS", 100)
    run(scenario())


@pytest.mark.parametrize("direction", [FORWARD, BACK])
@pytest.mark.parametrize("way", ["tokens", "inbox_way"])
def test_a_corrupted_message_is_refused(monkeypatch, way, direction) -> None:
    """Its connection ends. In the direction back, where pings are answered, ZeroMQ gives up the sender's socket."""

    async def scenario() -> None:
        async with far_scene() as now:
            rank = now.ranks[0]
            rank.may_end = False
            asked = [now.ask(f"r{number}", rank=0) for number in range(4)]
            await until(lambda: all(now.answers.values()))
            proxy: Proxy = getattr(rank, way)
            proxy.corrupt(direction)
            asked.append(now.ask("corrupted", rank=0))
            await until(lambda: proxy.corrupted)
            rank.may_end = True
            await whole(now, asked)

    monkeypatch.setattr(stream_watch, "ARRIVAL_BEATS", 20)  # a busy machine is no fault
    run(scenario())


def test_a_rank_that_sends_nothing_is_connected_again(monkeypatch, caplog) -> None:
    """A corrupted length lets the receiver wait for bytes, while ZeroMQ takes the connection for a good one."""

    async def scenario() -> None:
        async with far_scene() as now:
            rank = now.ranks[0]
            rank.may_end = False
            asked = now.ask("a", rank=0)
            await until(lambda: bool(now.answers["a"]))
            stalled = rank.tokens
            stalled.stall()
            await until(lambda: rank.num_openings > 1)
            rank.may_end = True
            await whole(now, [asked])
            stalled.flow()

    monkeypatch.setattr(stream_watch, "SILENCE_S", 0.5)
    run(scenario())
    assert "the stream of rank 0 is opened again: the rank has sent nothing for" in caplog.text


def test_a_stream_is_opened_again_once_there_are_descriptors(monkeypatch, caplog) -> None:
    """A socket of ZeroMQ needs one."""

    async def scenario() -> None:
        async with scene() as now:
            asked, rank = now.ask("a", rank=0), now.ranks[0]
            await rank.emit("a", 0, 2)
            await until(lambda: len(now.answers["a"]) == 2)
            (stream,) = rank.streams._open.values()
            with without_descriptors():
                stream.sender._sender.num_sent += 1  # as if a message had been lost
                await rank.emit("a", 3, 1)
                await until(lambda: "cannot be opened yet" in caplog.text)
            await rank.emit("a~2", 2, 2, finish=True)
            await asked
            assert now.answers["a"] == [100, 101, 102, 103]

    monkeypatch.setattr(ray_fakes, "FakeRank", FakeRank)
    monkeypatch.setattr(group_streams, "RETRY_S", 0.05)
    run(scenario())
    assert "Too many open files" in caplog.text


def test_a_request_that_comes_while_a_stream_is_opened_again_is_submitted_once(monkeypatch) -> None:
    """Its rank would run a first attempt beside it, whose tokens nobody takes, up to the limit of tokens."""
    open_again = GroupStreams._open_again

    async def open_and_ask(streams: GroupStreams, rank: int) -> None:
        await open_again(streams, rank)
        asked.append(now.ask("b", rank=rank))
        await until(lambda: "b" in now.group.open)

    async def scenario() -> None:
        nonlocal now
        async with scene() as now:
            rank = now.ranks[0]
            now.group._streams.lost(0)
            await until(lambda: "b~2" in rank.requests)
            assert list(rank.requests) == ["b~2"]
            await rank.emit("b~2", 0, 4, finish=True)
            await asked[0]
            assert now.answers["b"] == [100, 101, 102, 103]

    now: Any = None
    asked: list[asyncio.Task[None]] = []
    monkeypatch.setattr(ray_fakes, "FakeRank", FakeRank)
    monkeypatch.setattr(GroupStreams, "_open_again", open_and_ask)
    run(scenario())


def test_the_ends_of_streams_need_descriptors() -> None:
    """An error of ZeroMQ itself ended the ingress, OSError is waited for."""
    receiver = TokenReceiver("127.0.0.1", 0)
    with without_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            TokenReceiver("127.0.0.1", 0)
        with pytest.raises(OSError, match="Too many open files"):
            secure_socket.listen(receiver._context, "127.0.0.1")
    receiver.close()


@contextmanager
def without_descriptors() -> Iterator[None]:
    """Let this process open nothing more; what is open stays open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_beats_prove_that_messages_have_arrived() -> None:
    clock = Clock(10.0)
    watch = stream_watch.StreamWatch(clock)
    for _ in range(stream_watch.ARRIVAL_BEATS):
        clock.now += 1.0
        assert watch.beat(num_taken=0, num_sent=3) is None, "on their way"
    clock.now = 20.0
    reason = watch.beat(num_taken=2, num_sent=4)
    assert reason == "2 of 3 messages of this ingress have arrived at the rank"
    clock.now = 21.0
    assert watch.beat(num_taken=3, num_sent=4) is None
    clock.now = 22.0
    assert watch.beat(num_taken=None, num_sent=4) is not None


def test_beats_that_were_read_late_prove_no_loss() -> None:
    """After a pause of this process a request is sent first, then the beats of the pause are read."""
    clock = Clock(10.0)
    watch = stream_watch.StreamWatch(clock)
    clock.now = 20.0
    for _ in range(2 * stream_watch.ARRIVAL_BEATS):
        assert watch.beat(num_taken=0, num_sent=1) is None
    clock.now = 21.0
    assert watch.beat(num_taken=1, num_sent=1) is None


def test_a_rank_without_beats_is_silent_and_a_pause_of_this_process_is_not() -> None:
    """A client looks every 2 s."""
    clock = Clock(10.0)
    watch = stream_watch.StreamWatch(clock)

    def silences(*moments: float) -> list[str | None]:
        found = []
        for clock.now in moments:
            found.append(watch.silence())
        return found

    clock.now = 22.0
    watch.beat(num_taken=0, num_sent=0)
    assert silences(24.0, 26.0, 28.0, 29.4) == [None] * 4
    assert silences(31.0) == ["the rank has sent nothing for 9 s"]
    clock.now = 32.0
    watch.beat(num_taken=0, num_sent=0)
    assert silences(33.0, 60.0, 62.0) == [None] * 3, "a pause"
    assert silences(64.0) != [None]
