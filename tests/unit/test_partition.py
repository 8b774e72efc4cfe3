"""An ingress and a rank cannot reach each other, but both reach all others: requests go on, nothing doubles."""

import asyncio
from typing import Any

import pytest

from cluster.client import group_streams, stream_watch
from tests.unit import ray_fakes
from tests.unit.client_scene import OfFakes, Scene, run, use_fakes
from tests.unit.ray_fakes import until
from tests.unit.test_stream_faults import FarRank, far_scene, whole
from workers.rank import token_streams
from workers.wire import secure_socket
from workers.wire.secure_socket import StreamAddress


class PartedRank(FarRank):
    """A rank whose calls and connections wait between `part` and `mend`."""

    def __init__(self, rank: int, address: str = "127.0.0.1"):
        super().__init__(rank, address)
        self._whole = asyncio.Event()
        self._whole.set()

    async def open_stream(
        self, epoch: int, lease_id: str, address: StreamAddress, stream: bytes
    ) -> Any:
        await self._whole.wait()
        return await super().open_stream(epoch, lease_id, address, stream)

    def part(self) -> None:
        self._whole.clear()
        for proxy in self.proxies:
            proxy.stall()

    def mend(self) -> None:
        for proxy in self.proxies:
            proxy.flow()
        self._whole.set()


@pytest.fixture(autouse=True)
def parted_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 5})
    monkeypatch.setattr(ray_fakes, "FakeRank", PartedRank)
    monkeypatch.setattr(token_streams, "BEAT_S", 0.05)
    monkeypatch.setattr(stream_watch, "BEAT_S", 0.05)
    monkeypatch.setattr(secure_socket, "PING_MS", 200)
    monkeypatch.setattr(stream_watch, "ARRIVAL_BEATS", 100)  # a busy machine is no fault


async def all_have_tokens(now: Scene) -> None:
    """Each open request gets its next token."""
    before = {name: len(tokens) for name, tokens in now.answers.items()}
    await until(lambda: all(len(now.answers[name]) > count for name, count in before.items()))


async def notice(now: Scene, *ranks: int) -> None:
    """Let the client find these ranks silent, as it does SILENCE_S after they were cut off."""
    streams = now.group._streams

    def are_silent() -> bool:
        for rank in ranks:
            streams._watches[rank]._last_beat -= stream_watch.SILENCE_S
        return all(rank in streams._broken for rank in ranks)

    await until(are_silent)


def let_end(now: Scene) -> None:
    for rank in now.ranks:
        rank.may_end = True


async def open_requests(now: Scene) -> "list[asyncio.Task[None]]":
    """Open two requests on each rank; they go on until `let_end`."""
    for rank in now.ranks:
        rank.may_end = False
    asked = [now.ask(f"r{number}") for number in range(4)]
    await all_have_tokens(now)
    assert all(len(rank.requests) == 2 for rank in now.ranks)
    return asked


def test_other_ranks_go_on_with_the_requests_of_a_rank_that_is_cut_off(caplog) -> None:
    async def scenario() -> None:
        async with far_scene() as now:
            asked = await open_requests(now)
            cut, other = now.ranks
            cut.part()
            await notice(now, 0)
            await until(lambda: len(other.requests) == 4)
            await all_have_tokens(now)
            asked += [now.ask(f"n{number}") for number in range(3)]
            asked.append(now.ask("pinned", rank=0))
            await until(lambda: len(other.requests) == 7)
            silent = {"rank": 0, "silent": True}
            assert await now.client.rank_stats() == [silent, {"rank": 1}]
            assert list(now.client.token_ages()) == [1], "a probe would wait for ever"
            cut.mend()
            await until(lambda: "pinned~2" in cut.requests)
            assert not {name for name in cut.requests if name[0] == "r"}, (
                "what has moved is aborted"
            )
            assert sorted(now.client.token_ages()) == [0, 1]
            asked += [now.ask(f"m{number}") for number in range(8)]
            await until(lambda: len(cut.requests) > 3)
            let_end(now)
            await whole(now, asked)

    run(scenario())
    assert "rank 0 cannot be reached; other ranks go on with its requests" in caplog.text
    assert caplog.text.count("cannot be reached") == 1


def test_a_group_is_rebuilt_while_a_rank_is_cut_off(caplog, monkeypatch) -> None:
    """The new epoch serves without a stream of this rank."""

    async def scenario() -> None:
        async with far_scene() as now:
            asked = await open_requests(now)
            monkeypatch.setattr(group_streams, "OPEN_S", 0.3)
            cut = now.ranks[0]
            cut.part()
            await now.kill(1)
            await until(lambda: now.group.reachable and now.group.epoch == 1)
            assert now.ranks[0] is cut
            now.ranks[1].may_end = False
            await until(lambda: len(now.ranks[1].requests) == 4)
            await all_have_tokens(now)
            cut.mend()
            await until(lambda: len(now.client.token_ages()) == 2)
            let_end(now)
            await whole(now, asked)

    run(scenario())
    assert "rank 0 is opened again: the rank has not opened it within 0.3 s" in caplog.text


@pytest.mark.parametrize("rebuild", [False, True], ids=["in service", "in a rebuild"])
def test_requests_wait_while_no_rank_can_be_reached(caplog, monkeypatch, rebuild) -> None:
    async def scenario() -> None:
        async with far_scene() as now:
            asked = await open_requests(now)
            monkeypatch.setattr(group_streams, "OPEN_S", 0.3)
            cut = list(now.ranks)
            for rank in cut:
                rank.part()
            if rebuild:
                now.supervisor.launcher.make = PartedRank.part
                await now.kill(1)
                await until(lambda: now.ranks[1] is not cut[1])
                cut[1] = now.ranks[1]
                await until(lambda: "no rank has opened" in caplog.text)
            else:
                await notice(now, 0, 1)
            asked.append(now.ask("new"))
            for rank in cut:
                rank.mend()
            await all_have_tokens(now)
            let_end(now)
            await whole(now, asked)

    run(scenario())
