"""The Ray Serve deployment: an HTTP server process in front of the ranks. All of HTTP is in cluster/api.

Its end: no request is let in any more, those under way get their time, the port closes, the supervisor hears of it.
"""

import asyncio
import logging
import os
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from cluster.api.app import create_app
from cluster.api.gate import Gate
from cluster.api.record import Recorder
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import load_default_sampling, load_tokenizer
from cluster.config.phalanx_config import PhalanxConfig, max_num_seqs
from cluster.config.serve_section import open_choices_limit
from cluster.group.engine_client import EngineClient
from cluster.group.supervisor import STOPPING
from cluster.ingress.http_server import HttpServer
from cluster.metrics.metrics import IngressMetrics
from cluster.metrics.tracing import make_tracer
from workers.stats.log import set_up_logging

logger = logging.getLogger(__name__)

LAST_WORDS_S = 1.0  # for telling the clients of requests that took too long to finish
# What Serve waits beyond the drain before it kills a replica: closing connections takes a few seconds at worst.
KILL_AFTER_S = 10.0


@serve.deployment(
    # Admission is ours: Serve must neither queue nor refuse before we have looked.
    max_ongoing_requests=100_000,
)
@serve.ingress()
class Ingress:
    """One ingress replica; ready when the ranks are.

    listen: answer on serve.host:serve.port itself; otherwise requests come through Serve's proxies.
    api_key_digests: of the keys that clients may bring; none = no key is asked for.
    """

    async def __init__(
        self, config: PhalanxConfig, *, listen: bool, api_key_digests: tuple[bytes, ...]
    ):
        name = f"ingress {os.getpid()}"
        set_up_logging(name, config.serve.log_level, config.serve.log_format)
        self._tracer = make_tracer(config.serve.tracing)
        metrics = IngressMetrics()
        recorder = Recorder(metrics, self._tracer, access_log=config.serve.access_log)
        self._client = EngineClient(config)
        self._client.metrics_source = metrics.snapshot
        # The tokenizer's import takes seconds; the ranks come up meanwhile.
        connected = asyncio.create_task(self._client.connect())
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path)
        settings = _settings(config, api_key_digests)
        self._gate = Gate(settings.max_open_choices)
        self._app = create_app(lambda: self._client, tokenizer, settings, self._gate, recorder)
        await connected
        self._drain_timeout_s = config.serve.drain_timeout_s
        self._drained: asyncio.Task[None] | None = None
        self._server: HttpServer | None = None
        if listen:
            self._server = HttpServer(self._app, config.serve)
            self._server.start()
        self._follower = asyncio.create_task(self._drain_when_told())

    def __serve_build_asgi_app__(self) -> Any:
        """The application for Serve's proxies."""
        return self._app

    def check_health(self) -> None:
        """Asked by Serve from time to time; a replica that raises is replaced."""
        if self._server is not None and not self._gate.closed:
            self._server.check()

    async def __del__(self) -> None:
        if hasattr(self, "_follower"):
            self._follower.cancel()
            await self._drain(self._drain_timeout_s)
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
        await self._client.close()

    async def _drain_when_told(self) -> None:
        try:
            await self._drain(await self._client.drain_asked())
            await self._client.report_drained()
        except (
            RayError
        ) as error:  # the ranks are gone with the supervisor; every request is told so
            logger.warning("the supervisor is gone: %s", type(error).__name__)

    async def _drain(self, timeout_s: float) -> None:
        """Once, however often it is asked for."""
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain_once(timeout_s))
        await asyncio.shield(self._drained)

    async def _drain_once(self, timeout_s: float) -> None:
        gate = self._gate
        gate.close(STOPPING)
        try:
            await asyncio.wait_for(gate.wait_empty(), timeout_s)
        except TimeoutError:
            if gate.num_requests:
                logger.warning("%d requests did not finish in %g s", gate.num_requests, timeout_s)
            gate.end_all()
            await asyncio.wait((asyncio.ensure_future(gate.wait_empty()),), timeout=LAST_WORDS_S)
        if self._server is not None:
            await self._server.stop()


def deploy(
    config: PhalanxConfig, *, listen: bool, api_key_digests: tuple[bytes, ...]
) -> serve.Application:
    """The Serve application of a configuration."""
    actor_options: dict[str, Any] = {"num_cpus": 0}
    if config.cluster.ray_address is not None:
        # A local Ray inherits our environment; on a cluster it has to be carried along.
        settings = {k: v for k, v in os.environ.items() if k.startswith("OTEL_")}
        actor_options["runtime_env"] = {"env_vars": settings}
    options = Ingress.options(
        ray_actor_options=actor_options,
        num_replicas=config.serve.replicas,
        graceful_shutdown_timeout_s=config.serve.drain_timeout_s + KILL_AFTER_S,
    )
    return options.bind(config, listen=listen, api_key_digests=api_key_digests)


def _settings(config: PhalanxConfig, api_key_digests: tuple[bytes, ...]) -> ApiSettings:
    serve_config = config.serve
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    num_running = config.cluster.ranks * max_num_seqs(config, num_gpus)
    return ApiSettings(
        **serve_config.limits.model_dump(exclude={"keep_alive_s"}),
        max_open_choices=open_choices_limit(serve_config, num_running),
        api_key_digests=api_key_digests,
        cors_origins=tuple(serve_config.cors_origins),
        tool_parser=serve_config.tool_parser,
        reasoning_parser=serve_config.reasoning_parser,
        default_sampling=load_default_sampling(config.model.path),
    )
