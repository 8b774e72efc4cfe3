"""An engine client over fake ranks and real sockets, and what tests do with it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
from ray.exceptions import ActorDiedError

from cluster.client import engine_client, group_client, request_run
from cluster.client.engine_client import EngineClient
from cluster.client.group_client import GroupClient
from cluster.config.phalanx_config import PoolGroup, Role
from cluster.supervisor import actor, supervisor
from cluster.supervisor.supervisor import Supervisor
from tests.unit.ray_fakes import FakeHandle, FakeRank, fake_group, phalanx_config, until
from workers.wire.request import SamplingParams

PARAMS = SamplingParams(max_tokens=8)


class OfFakes(Supervisor):
    """A supervisor of groups of two fake ranks: one group, or a group for each of `names`, of the role in `roles`."""

    group_options: ClassVar[dict[str, Any]] = {}
    names: ClassVar[tuple[str, ...]] = ("app",)
    roles: ClassVar[dict[str, Role]] = {}

    def _create_groups(self, config: Any) -> list[Any]:
        made = [
            fake_group(
                2,
                name=name,
                role=self.roles.get(name, "generate"),
                epoch_begins=partial(self._note_epoch, name),
                **self.group_options,
            )
            for name in self.names
        ]
        self.launchers = [launcher for _, _, launcher in made]
        _, self.fake_ranks, self.launcher = made[0]
        return [group for group, _, _ in made]


class Scene:
    """A connected client, its supervisor and its ranks."""

    def __init__(self, client: EngineClient, handle: FakeHandle):
        self.client, self.handle = client, handle
        self.supervisor: OfFakes = handle.target
        self.answers: dict[str, list[int]] = {}

    @property
    def ranks(self) -> list[FakeRank]:
        """The ranks of the present processes of the first group."""
        return self.ranks_of(0)

    def ranks_of(self, group: int) -> list[FakeRank]:
        return self.supervisor.launchers[group].ranks

    @property
    def group(self) -> GroupClient:
        """The client's view of the first group."""
        return self.client._groups[0]

    async def kill(self, rank: int, group: int = 0) -> None:
        """End a rank's process while the group is watched."""
        ranks = self.ranks_of(group)
        await until(lambda: bool(ranks[rank].calls["done"]))
        self.supervisor.launchers[group].handles[rank].dead = True
        ranks[rank].ended.set_exception(ActorDiedError())

    def hold_rebuild(self, group: int) -> asyncio.Event:
        """Let the next epoch of a group begin when the event is set, not before."""
        (rank, *_), begins = self.ranks_of(group), asyncio.Event()
        run_stage = rank.run_stage

        async def run_stage_late(name: str) -> None:
            await begins.wait()
            await run_stage(name)

        rank.run_stage = run_stage_late  # type: ignore[method-assign]
        return begins

    def ask(self, request_id: str, **options: Any) -> "asyncio.Task[None]":
        """Send a request and collect its tokens in `answers`."""
        self.answers[request_id] = []
        prompt = [1, 2, len(self.answers)]  # another one for each request

        async def collect() -> None:
            generator = self.client.generate(request_id, prompt, PARAMS, **options)
            try:
                async for output in generator:
                    self.answers[request_id] += output.token_ids
            finally:
                await generator.aclose()

        return asyncio.create_task(collect())

    def expire_leases(self) -> None:
        """What the supervisor does LEASE_S after an ingress stalled."""
        for lease_id in list(self.supervisor._leases._leases):
            self.supervisor._end_lease(lease_id)

    @property
    def outstanding(self) -> tuple[int, ...]:
        return tuple(load.outstanding for load in self.client._router.loads)

    @property
    def outstanding_prefill(self) -> tuple[int, ...]:
        return tuple(load.prefill for load in self.client._router.loads)


@asynccontextmanager
async def scene(**serve: Any):
    pool = [PoolGroup(role=OfFakes.roles.get(name, "generate"), ranks=2) for name in OfFakes.names]
    config = phalanx_config(**serve).model_copy(update={"pool": pool})
    subject = OfFakes(config)
    handle = FakeHandle(subject)
    actor.get_or_create = lambda config: handle  # restored by the fixture
    client = EngineClient(config)
    try:
        await client.connect()
        yield Scene(client, handle)
    finally:
        handle.dead = False
        await client.close()
        await asyncio.sleep(0.01)
        await end_tasks(subject)
        for launcher in subject.launchers:
            for rank in launcher.ranks:
                rank.close()


@asynccontextmanager
async def second_ingress(first: Scene) -> AsyncIterator[Scene]:
    """Another ingress of the same ranks."""
    client = EngineClient(first.client._config)
    try:
        await client.connect()
        yield Scene(client, first.handle)
    finally:
        await client.close()


async def end_tasks(subject: Supervisor) -> None:
    """End the tasks of a supervisor's process; the ranks go on."""
    for task in subject._tasks:
        await task.close()
    await subject._pool.close()


def use_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients find a fake supervisor, until the end of the test."""
    monkeypatch.setattr(supervisor, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(actor, "get_or_create", actor.get_or_create)
    monkeypatch.setattr(group_client, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(engine_client, "HEARTBEAT_S", 0.02)


def use_two_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also two groups, p which computes prompts and d which decodes; all prompts are long enough for p."""
    use_fakes(monkeypatch)
    monkeypatch.setattr(OfFakes, "names", ("p", "d"))
    monkeypatch.setattr(OfFakes, "roles", {"p": "prefill", "d": "decode"})
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 3, "hang_timeout_s": 0.5})
    monkeypatch.setattr(request_run, "LOCAL_TOKENS", 0)


def run(coroutine: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await coroutine

    return asyncio.run(bounded())
