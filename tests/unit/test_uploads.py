"""Work before admission is bounded: bytes of bodies, connections, looks at the ranks."""

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request

from cluster.api.request import uploads
from cluster.api.request.uploads import Uploads
from cluster.api.settings import ApiSettings
from cluster.errors import ClientTimeoutError, OverloadedError
from tests.unit.api_fakes import Api, FakeBackend

SETTINGS = ApiSettings(max_body_bytes=800, max_upload_bytes=1000)


class Upload:
    """A request with a body whose parts arrive when `send` is called."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        self.request = Request(scope, self._messages.get)

    def send(self, num_bytes: int, *, last: bool = False) -> None:
        message = {"type": "http.request", "body": b"x" * num_bytes, "more_body": not last}
        self._messages.put_nowait(message)


async def read(all_of_them: Uploads, upload: Upload) -> int:
    async with all_of_them.body(upload.request) as body:
        return len(body)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_an_upload_whose_time_is_just_over_is_no_error_of_another_one(monkeypatch):
    async def scenario() -> None:
        monkeypatch.setattr(uploads, "_SLOW_S", 0.0)
        bodies, slow, other = Uploads(SETTINGS), Upload(), Upload()
        slow.send(600)
        reading = asyncio.create_task(read(bodies, slow))
        await turns()
        (held,) = bodies._arriving
        held.timeout.reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(0)  # its time is over, and its task has not run since
        other.send(500, last=True)
        assert await read(bodies, other) == 500
        with pytest.raises(ClientTimeoutError):
            await reading
        assert bodies.num_bytes == 0

    asyncio.run(scenario())


def test_bodies_together_have_a_limit():
    async def scenario() -> None:
        bodies, first, second = Uploads(SETTINGS), Upload(), Upload()
        first.send(600)
        reading = asyncio.create_task(read(bodies, first))
        await turns()
        assert bodies.num_bytes == 600
        second.send(500, last=True)
        with pytest.raises(OverloadedError, match="600 of 1000 bytes"):
            await read(bodies, second)
        first.send(100, last=True)
        assert await reading == 700 and bodies.num_bytes == 0
        second = Upload()
        second.send(500, last=True)
        assert await read(bodies, second) == 500

    asyncio.run(scenario())


def test_a_body_counts_until_it_is_prepared():
    async def scenario() -> None:
        bodies, first, second = Uploads(SETTINGS), Upload(), Upload()
        first.send(600, last=True)
        second.send(500, last=True)
        async with bodies.body(first.request):
            with pytest.raises(OverloadedError):
                await read(bodies, second)
        assert bodies.num_bytes == 0

    asyncio.run(scenario())


def test_a_slow_upload_ends_where_others_need_its_memory(monkeypatch):
    async def scenario() -> None:
        monkeypatch.setattr(uploads, "_SLOW_S", 0.0)
        bodies, slow, other = Uploads(SETTINGS), Upload(), Upload()
        slow.send(600)
        reading = asyncio.create_task(read(bodies, slow))
        await turns()
        other.send(500, last=True)
        assert await read(bodies, other) == 500
        with pytest.raises(ClientTimeoutError, match="others need its memory"):
            await reading
        assert bodies.num_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("num_bytes", [50, 200], ids=["fits", "does not fit"])
def test_a_slow_upload_that_has_ended_reads_its_last_part(monkeypatch, num_bytes):
    """Parts of two uploads wait in their sockets at once, and the upload that needs the memory reads first."""

    async def scenario() -> None:
        monkeypatch.setattr(uploads, "_SLOW_S", 0.0)
        bodies, slow, other = Uploads(ApiSettings(max_upload_bytes=1000)), Upload(), Upload()
        prepared = asyncio.Event()

        async def prepare() -> None:
            async with bodies.body(other.request):
                await prepared.wait()

        slow.send(600)
        reading = asyncio.create_task(read(bodies, slow))
        await turns()
        other.send(900, last=True)
        preparing = asyncio.create_task(prepare())
        slow.send(num_bytes, last=True)
        with pytest.raises(ClientTimeoutError, match="others need its memory"):
            await reading
        assert bodies.num_bytes == 900
        prepared.set()
        await preparing
        assert bodies.num_bytes == 0

    asyncio.run(scenario())


class CountingBackend(FakeBackend):
    """Counts the calls that reach all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"rank_stats": 0, "groups": 0, "ingress_metrics": 0}
        self.token_times = {0: float("inf")}

    async def rank_stats(self) -> list[dict[str, Any]]:
        self.calls["rank_stats"] += 1
        await asyncio.sleep(0.01)
        return await super().rank_stats()

    async def groups(self) -> list[dict[str, Any]]:
        self.calls["groups"] += 1
        return await super().groups()

    async def ingress_metrics(self, own: Any) -> Any:
        self.calls["ingress_metrics"] += 1
        return own


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        ("/metrics", {"rank_stats": 1, "groups": 1, "ingress_metrics": 1}),
        ("/ranks", {"rank_stats": 1, "groups": 1, "ingress_metrics": 0}),
        ("/ready", {"rank_stats": 0, "groups": 1, "ingress_metrics": 0}),
    ],
)
def test_one_look_at_the_ranks_serves_many_requests(path, calls):
    backend = CountingBackend()
    api = Api(backend, stats_fresh_s=60.0)

    async def scenario() -> None:
        async with api.client() as client:
            together = await asyncio.gather(*(client.get(path) for _ in range(10)))
            assert {answer.status_code for answer in together} == {200}
            assert (await client.get(path)).content == together[0].content

    asyncio.run(scenario())
    assert backend.calls == calls


def test_an_error_is_not_kept():
    class Failing(FakeBackend):
        async def rank_stats(self) -> list[dict[str, Any]]:
            if not self.stats:
                raise TimeoutError
            return self.stats

    backend = Failing()
    api = Api(backend, stats_fresh_s=60.0)
    assert api.get("/ranks").status_code == 503
    backend.stats = [{"rank": 0}]
    assert [rank["rank"] for rank in json.loads(api.get("/ranks").content)["ranks"]] == [0]
