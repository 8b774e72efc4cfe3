"""Ray, the ranks and a client of the ranks in this process: what `phalanx serve` starts, without HTTP."""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.commands.preflight import Preflight
from cluster.commands.start import RankStart, ServerError
from cluster.commands.stop_signals import StopSignals
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import check_num_ranks
from kernels.host.owned import start_thread

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.api.tokenizer import ServingTokenizer
    from cluster.client.engine_client import EngineClient
    from cluster.offline.dispatcher import Dispatcher

T = TypeVar("T")

QUEUED = 2
"""Requests in flight for each that can run, so that a rank finds the next one tokenised when a place is free."""


class StoppedError(Exception):
    """A signal ended the start."""


class OfflineEngine:
    """The ranks of one configuration; `close` ends them. The client runs in an event loop on a thread of its own.

    The constructor returns when the ranks serve. Raises ServerError when they do not start, and ConfigError and
    BackendChoiceError when the configuration does not fit this machine. Raises StoppedError after a signal in `stop`.
    """

    client: "EngineClient"
    dispatcher: "Dispatcher"
    concurrency: int
    """Requests to have in flight."""

    def __init__(
        self, config: PhalanxConfig, console: "Console", stop: StopSignals | None = None
    ) -> None:
        self._config = config = _without_http(config)
        self._loop = _LoopThread()
        self._connected = False
        check_num_ranks(config)
        self._preflight = Preflight(config, 0)
        self._ranks = RankStart(config, stop or StopSignals(), self._preflight, console)
        try:
            self._start(stop)
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop of the client to its end; KeyboardInterrupt cancels it."""
        return self._loop.run(work)

    def close(self) -> None:
        """Stop the ranks and Ray, also after a second Ctrl-C."""
        with contextlib.ExitStack() as ends:
            ends.callback(self._preflight.close)
            ends.callback(self._loop.close)
            ends.callback(self._ranks.shut_down)
            if self._connected:
                self.run(self.client.close())

    def _start(self, stop: StopSignals | None) -> None:
        ranks = self._ranks
        if not ranks.start_ray():
            raise StoppedError
        if stop is not None:
            stop.install()  # again, because Ray has replaced the handlers
        with ranks.explained(), ThreadPoolExecutor(1) as executor:
            if not ranks.create():
                raise StoppedError
            tokenizer = executor.submit(_load_tokenizer, self._config)
            if not ranks.follow("tokenizer", lambda: _is_done(tokenizer)):
                raise StoppedError
        self.run(self._connect(tokenizer.result()))

    async def _connect(self, tokenizer: "ServingTokenizer") -> None:
        from cluster.client.engine_client import EngineClient
        from cluster.ingress.settings import api_settings, num_running
        from cluster.offline.dispatcher import Dispatcher

        self.client = EngineClient(self._config)
        self._connected = True
        await self.client.connect()
        self.dispatcher = Dispatcher(self.client, tokenizer, api_settings(self._config))
        self.concurrency = QUEUED * num_running(self._config)


class _LoopThread:
    """An event loop on a thread of its own: uvloop where it is installed."""

    def __init__(self) -> None:
        factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
        with contextlib.suppress(ImportError):
            from uvloop import new_event_loop as factory
        self._loop = factory()
        self._failed: Future[None] = Future()
        self._thread = start_thread(self._loop.run_forever, self._failed.set_exception, "offline")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._failed.done():
            work.close()
            raise self._failure()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        ends: tuple[Future[Any], ...] = (future, self._failed)
        try:
            wait(ends, return_when=FIRST_COMPLETED)
            if not future.done():
                raise self._failure()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _failure(self) -> RuntimeError:
        return RuntimeError(f"the event loop of the client failed: {self._failed.exception()!r}")


def _without_http(config: PhalanxConfig) -> PhalanxConfig:
    """Return the configuration of a supervisor of its own, with one ingress, which is this process.

    The lines of level info, each rank's work of ten seconds, would break the progress bar.
    """
    name = f"{config.serve.app_name}-offline-{uuid.uuid4().hex[:8]}"
    changes: dict[str, Any] = {"app_name": name, "replicas": 1, "host": "127.0.0.1"}
    if config.serve.log_level == "info":
        changes["log_level"] = "warning"
    return config.model_copy(update={"serve": config.serve.model_copy(update=changes)})


def _load_tokenizer(config: PhalanxConfig) -> "ServingTokenizer":
    from cluster.ingress.settings import serving_tokenizer

    return serving_tokenizer(config)


def _is_done(tokenizer: "Future[ServingTokenizer]") -> bool:
    if tokenizer.done() and (error := tokenizer.exception()) is not None:
        raise ServerError(f"the tokenizer does not load: {error}") from error
    return tokenizer.done()
