"""What the bench's tests share: a load with short settings, runs of it, and a clock that jumps.

In virtual time nothing waits: the loop's clock jumps to the next timer, client and server talk
through memory, and every latency can be foretold to the microsecond.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.bench.http import Connection
from cluster.bench.progress import Progress
from cluster.bench.report import build_report
from cluster.bench.session import Session, run_session
from cluster.bench.settings import Load
from tests.unit.bench_server import FakeServer


def load(**changes: Any) -> Load:
    settings: dict[str, Any] = {
        "endpoint": "completions",
        "requests": 12,
        "concurrency": 4,
        "input_len": 20,
        "output_len": 8,
        "warmup": 2,
        "rounds": 1,
        "seed": 0,
        "temperature": 0.0,
        "ignore_eos": True,
        "prompts": "auto",
        "vocab_size": 256,
        "timeout_s": 10.0,
    }
    return Load(**settings | changes)


def answers_of(session: Session) -> list[Any]:
    return [answer for each in session.servers[0].rounds for answer in each.answers]


async def measure(
    load: Load, urls: Mapping[str, str], model: str | None = None, **headers: str
) -> dict[str, Any]:
    """The report of a run."""
    return build_report(load, await run_session(load, urls, model, headers, Progress()))


async def with_server(
    fake: FakeServer, use: Callable[[str], Coroutine[Any, Any, dict[str, Any]]]
) -> dict[str, Any]:
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    try:
        return await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()


def run(fake: FakeServer, **changes: Any) -> dict[str, Any]:
    """The report's entry of one server, over real sockets."""
    report = asyncio.run(with_server(fake, lambda url: measure(load(**changes), {"fake": url})))
    return report["servers"][0]


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time stands still while code runs, and jumps to the next timer when all wait."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_JumpSelector(self))

    def time(self) -> float:
        return self.now


class _JumpSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "all wait and no timer runs: a hang"
        self._loop.now += max(timeout, 0)
        return super().select(0)


class _Link:
    """The client's transport, and the writer of the server, at two ends of memory."""

    def __init__(self, client: Connection, fake: FakeServer):
        self._client = client
        self._reader = asyncio.StreamReader()
        self._closed = False
        self.transport = self
        self._serving = asyncio.ensure_future(
            fake.serve(self._reader, SimpleNamespace(write=self._to_client, **self._calls()))  # type: ignore[arg-type]
        )

    def _calls(self) -> dict[str, Any]:
        async def drain() -> None:
            pass

        return {"drain": drain, "close": self.abort, "transport": self}

    def write(self, data: bytes) -> None:
        self._reader.feed_data(data)

    def is_closing(self) -> bool:
        return self._closed

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._serving.cancel()
            asyncio.get_running_loop().call_soon(self._client.connection_lost, None)

    def _to_client(self, data: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._client.data_received, data)


def run_virtual(
    monkeypatch: pytest.MonkeyPatch,
    fakes: Mapping[str, FakeServer],
    load: Load,
    cancel_after_s: float | None = None,
    cancel_ticks: int = 0,
) -> Session:
    """A whole run in virtual time; a server's URL is http://NAME. Cancelled like by Ctrl-C.

    `cancel_ticks`: so many turns of the loop later, within the same moment.
    """
    loop = VirtualLoop()
    clock = SimpleNamespace(perf_counter=loop.time, process_time=time.process_time)
    for module in ("http", "load"):
        monkeypatch.setattr(f"cluster.bench.{module}.time", clock)

    async def connect(client: Connection, timeout_s: float) -> None:
        fake = fakes[client._endpoint.host]
        fake.clock = loop.time
        client.connection_made(_Link(client, fake))  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "_connect", connect)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:

        async def main() -> Session:
            urls = {name: f"http://{name}" for name in fakes}
            task = asyncio.ensure_future(run_session(load, urls, None, {}, Progress()))

            def cancel(ticks: int) -> None:
                if ticks:
                    loop.call_soon(cancel, ticks - 1)
                else:
                    task.cancel()

            if cancel_after_s is not None:
                loop.call_later(cancel_after_s, cancel, cancel_ticks)
            return await task

        return runner.run(main())
