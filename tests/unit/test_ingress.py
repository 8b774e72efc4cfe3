"""The ingress replica without Ray: its health as Serve sees it, and the order of its shutdown."""

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from cluster.config.api_keys import KeyDigests
from cluster.errors import SHUTDOWN_REASON, EngineDeadError
from cluster.ingress import ingress, settings
from tests.unit.api_fakes import FakeBackend, tiny_tokenizer
from tests.unit.ray_fakes import phalanx_config, until

IngressClass: Any = ingress.Ingress.func_or_class


class FakeClient(FakeBackend):
    """An engine client that is connected at once; `drain` lets `drain_requested` return."""

    made: ClassVar[list[Any]] = []

    def __init__(self, config: Any, *, replace_failed: bool):
        super().__init__()
        self.replace_failed = replace_failed
        self.events: list[str] = []
        self.failure = self.broken = ""
        self.drain = asyncio.Event()
        FakeClient.made.append(self)

    async def connect(self) -> None:
        self.events.append("connected")

    def health(self) -> tuple[bool, str]:
        return not self.failure, self.failure

    def check(self) -> None:
        if self.broken:
            raise EngineDeadError(self.broken)

    def fail(self, error: BaseException) -> None:
        self.broken = str(error)

    async def drain_requested(self) -> float:
        await self.drain.wait()
        return 0.05

    async def report_drained(self) -> None:
        self.events.append("drained")

    async def close(self) -> None:
        self.events.append("closed")


class FakeServer:
    """An HTTP server that only notes what is done to it."""

    def __init__(self, app: Any, config: Any):
        self.events: list[str] = []
        self.broken = False

    def start(self) -> None:
        self.events.append("started")

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("the HTTP server of this ingress has ended")

    async def stop(self) -> None:
        self.events.append("stopped")


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "made", [])
    monkeypatch.setattr(ingress, "EngineClient", FakeClient)
    monkeypatch.setattr(ingress, "HttpServer", FakeServer)
    monkeypatch.setattr(ingress, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(ingress, "serving_tokenizer", lambda config: tiny_tokenizer())
    monkeypatch.setattr(settings, "load_default_sampling", lambda path: {})
    text_alone = SimpleNamespace(pooling=None, vision=None)
    monkeypatch.setattr(settings, "configured_model", lambda section: text_alone)
    monkeypatch.setattr(settings, "num_gpus", lambda: 0)
    monkeypatch.setattr(settings, "max_num_seqs", lambda config, num_gpus: 4)


async def replica(*, listen: bool) -> Any:
    subject = IngressClass.__new__(IngressClass)
    keys = KeyDigests()
    await subject.__init__(phalanx_config(), listen=listen, keys=keys, environment={})
    return subject


def run(coroutine: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await coroutine

    return asyncio.run(bounded())


async def remove(subject: Any) -> None:
    """What Serve does with a replica that is no longer wanted."""
    await IngressClass.__del__(subject)


def test_under_serve_alone_a_failed_group_makes_the_replica_unhealthy():
    async def scenario() -> None:
        subject = await replica(listen=False)
        (client,) = FakeClient.made
        assert client.replace_failed
        subject.check_health()
        client.failure = "rank 1: its process died"
        with pytest.raises(EngineDeadError, match="rank 1"):
            subject.check_health()
        subject._gate.close("it stops")
        subject.check_health()
        await remove(subject)

    run(scenario())


def test_under_the_launcher_only_the_http_server_counts():
    async def scenario() -> None:
        subject = await replica(listen=True)
        (client,) = FakeClient.made
        assert not client.replace_failed, "the launcher shows why the first supervisor failed"
        client.failure = "rank 1: its process died"
        subject.check_health()
        client.broken = "a task has ended"
        with pytest.raises(EngineDeadError, match="a task has ended"):
            subject.check_health()
        client.broken = ""
        subject._server.broken = True
        with pytest.raises(RuntimeError, match="HTTP server"):
            subject.check_health()
        await remove(subject)

    run(scenario())


def test_a_requested_drain_ends_requests_then_the_port_then_reports():
    async def scenario() -> None:
        subject = await replica(listen=True)
        (client,) = FakeClient.made
        ticket = subject._gate.admit(1)
        ticket.timeout = SimpleNamespace(expired=lambda: False, reschedule=lambda when: ended.set())
        ended = asyncio.Event()
        client.drain.set()
        await until(lambda: bool(subject._gate.closed))
        assert subject._gate.closed == SHUTDOWN_REASON and subject._server.events == ["started"]
        await ended.wait()
        assert client.events == ["connected"], "a request is still open"
        ticket.release()
        await until(lambda: client.events[-1] == "drained")
        assert subject._server.events == ["started", "stopped"]
        await remove(subject)
        assert client.events == ["connected", "drained", "closed"]

    run(scenario())


def test_a_replica_that_is_removed_finishes_its_requests():
    async def scenario() -> None:
        subject = await replica(listen=True)
        (client,) = FakeClient.made
        ticket = subject._gate.admit(1)
        removal = asyncio.create_task(remove(subject))
        await asyncio.sleep(0.02)
        assert not removal.done() and subject._server.events == ["started"]
        ticket.release()
        await removal
        assert subject._server.events == ["started", "stopped"]
        assert client.events == ["connected", "closed"]

    run(scenario())
