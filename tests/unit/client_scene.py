"""An engine client over fake ranks and real sockets, and what tests do with it."""

import asyncio
from collections.abc import Awaitable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from ray.exceptions import ActorDiedError

from cluster.client import engine_client
from cluster.client.engine_client import EngineClient
from cluster.supervisor import supervisor
from cluster.supervisor.supervisor import Supervisor
from tests.unit.ray_fakes import FakeHandle, FakeRank, fake_group, phalanx_config, until
from workers.wire.request import SamplingParams

PARAMS = SamplingParams(max_tokens=8)


class OfFakes(Supervisor):
    """A supervisor of one group of two fake ranks."""

    group_options: ClassVar[dict[str, Any]] = {}

    def _create_groups(self, config: Any) -> list[Any]:
        group, self.fake_ranks, self.launcher = fake_group(2, **self.group_options)
        return [group]


class Scene:
    """A connected client, its supervisor and its ranks."""

    def __init__(self, client: EngineClient, handle: FakeHandle):
        self.client, self.handle = client, handle
        self.supervisor: OfFakes = handle.target
        self.answers: dict[str, list[int]] = {}

    @property
    def ranks(self) -> list[FakeRank]:
        """The ranks of the present processes."""
        return self.supervisor.launcher.ranks

    async def kill(self, rank: int) -> None:
        """End a rank's process while the group is watched."""
        await until(lambda: bool(self.ranks[rank].calls["done"]))
        self.supervisor.launcher.handles[rank].dead = True
        self.ranks[rank].ended.set_exception(ActorDiedError())

    def ask(self, request_id: str, **options: Any) -> "asyncio.Task[None]":
        """Send a request and collect its tokens in `answers`."""
        self.answers[request_id] = []

        async def collect() -> None:
            generator = self.client.generate(request_id, [1, 2, 3], PARAMS, **options)
            try:
                async for output in generator:
                    self.answers[request_id] += output.token_ids
            finally:
                await generator.aclose()

        return asyncio.create_task(collect())

    def expire_leases(self) -> None:
        """What the supervisor does LEASE_S after an ingress stalled."""
        for lease_id in list(self.supervisor._leases._leases):
            self.supervisor._leases.close(lease_id)
            self.supervisor._close_streams(lease_id)

    @property
    def outstanding(self) -> tuple[int, ...]:
        return self.client._router.outstanding

    @property
    def outstanding_prefill(self) -> tuple[int, ...]:
        return self.client._router.outstanding_prefill


@asynccontextmanager
async def scene(**serve: Any):
    config = phalanx_config(**serve)
    subject = OfFakes(config)
    handle = FakeHandle(subject)
    supervisor.get_or_create = lambda config: handle  # restored by the fixture
    client = EngineClient(config)
    await client.connect()
    try:
        yield Scene(client, handle)
    finally:
        handle.dead = False
        await client.close()
        await asyncio.sleep(0.01)
        for task in subject._tasks:
            task.cancel()
        await asyncio.gather(*subject._tasks, return_exceptions=True)
        for rank in subject.launcher.ranks:
            rank.close()


def use_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients find a fake supervisor, until the end of the test."""
    monkeypatch.setattr(supervisor, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(supervisor, "get_or_create", supervisor.get_or_create)
    monkeypatch.setattr(engine_client, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(engine_client, "HEARTBEAT_S", 0.02)


def run(coroutine: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await coroutine

    return asyncio.run(bounded())
