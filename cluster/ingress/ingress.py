"""The Ray Serve deployment: an HTTP server process in front of the ranks. All of HTTP is in cluster/api.

Shutdown: the gate refuses new requests, open requests get their time, the port closes, the supervisor gets a report.
"""

import asyncio
import gc
import logging
import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayError

from cluster.api.admission import make_gate
from cluster.api.app import create_app
from cluster.api.record import Recorder
from cluster.api.tracing import make_tracer
from cluster.client.engine_client import EngineClient
from cluster.config.api_keys import KeyDigests
from cluster.config.phalanx_config import PhalanxConfig
from cluster.errors import SHUTDOWN_REASON, EngineDeadError
from cluster.ingress.http_server import HttpServer
from cluster.ingress.settings import api_settings, key_limits, serving_tokenizer
from cluster.metrics.metrics import IngressMetrics
from kernels.host.owned import OwnedTask
from workers.log import set_up_logging
from workers.rank.actor import node_address

logger = logging.getLogger(__name__)

ERROR_DELIVERY_S = 1.0  # for the error messages of requests that did not finish in time
# Time between the drain's end and the end of a replica by Serve: closing connections takes a few seconds at worst.
KILL_AFTER_S = 10.0
# Serve replaces a replica after three failed checks. Its own period of 10 s would let a failed group stay for 30 s.
HEALTH_CHECK_PERIOD_S = 1.0
NODE_SHARE = 0.001  # of the resource by which a replica is placed on one node; the node has 1 of it


@serve.deployment(
    # The gate admits requests; Serve must neither queue nor refuse them before.
    max_ongoing_requests=100_000,
)
@serve.ingress()
class Ingress:
    """One ingress replica; ready when all groups serve.

    listen: answer on serve.host:serve.port. `phalanx serve` sets it and watches the groups itself. Otherwise requests
        come through Serve's proxies, and Serve alone watches: then a failed group makes the replica unhealthy, and the
        replica that replaces it starts the group again.
    keys: digests of the keys of clients and operators.
    environment: variables of OpenTelemetry that this process does not inherit.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: PhalanxConfig,
        *,
        listen: bool,
        keys: KeyDigests,
        environment: Mapping[str, str],
    ) -> None:
        os.environ.update(environment)
        name = f"ingress {os.getpid()}"
        set_up_logging(name, config.serve.log_level, config.serve.log_format)
        self._tracer = make_tracer(config.serve.tracing)
        metrics = IngressMetrics()
        recorder = Recorder(metrics, self._tracer, access_log=config.serve.access_log)
        self._client = EngineClient(config, replace_failed=not listen)
        self._client.metrics_source = metrics.snapshot
        self._client.count_prompt = metrics.observe_prompt
        # The tokenizer's import takes seconds; the ranks start meanwhile.
        connected = asyncio.create_task(self._client.connect())
        tokenizer = await asyncio.to_thread(serving_tokenizer, config)
        settings = api_settings(config, keys)
        self._gate = make_gate(settings, key_limits(config.serve.access))
        self._app = create_app(lambda: self._client, tokenizer, settings, self._gate, recorder)
        self._drain_timeout_s = config.serve.drain_timeout_s
        self._drained: asyncio.Task[None] | None = None
        self._server: HttpServer | None = None
        if listen:  # /live and the state of the start are answered before the ranks serve
            self._server = HttpServer(self._app, config.serve)
            self._server.start()
        await connected
        gc.freeze()  # modules and tokenizer live as long as the process, and a search through them stops all streams
        self._drainer = OwnedTask(
            self._drain_on_request(), self._client.fail, "drain-on-request", may_end=True
        )

    def __serve_build_asgi_app__(self) -> Any:
        """The application for Serve's proxies."""
        return self._app

    def check_health(self) -> None:
        """Serve calls it from time to time and replaces a replica that raises."""
        if self._gate.closed:
            return
        self._client.check()
        if self._server is not None:
            self._server.check()
            return
        healthy, reason = self._client.health()
        if not healthy:
            raise EngineDeadError(reason)

    async def __del__(self) -> None:
        if hasattr(self, "_drainer"):
            self._drainer.cancel()
            await self._drain(self._drain_timeout_s)
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
        await self._client.close()

    async def _drain_on_request(self) -> None:
        try:
            await self._drain(await self._client.drain_requested())
            await self._client.report_drained()
        except RayError as error:  # the client ends the open requests with an error
            logger.warning("the supervisor is gone: %s", type(error).__name__)

    async def _drain(self, timeout_s: float) -> None:
        """Drain once; later calls wait for the first."""
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain_once(timeout_s))
        await asyncio.shield(self._drained)

    async def _drain_once(self, timeout_s: float) -> None:
        gate = self._gate
        gate.close(SHUTDOWN_REASON)
        try:
            async with asyncio.timeout(timeout_s):
                await gate.wait_empty()
        except TimeoutError:
            if gate.num_requests:
                logger.warning("%d requests did not finish in %g s", gate.num_requests, timeout_s)
            gate.end_all()
            await asyncio.wait(
                (asyncio.ensure_future(gate.wait_empty()),), timeout=ERROR_DELIVERY_S
            )
        if self._server is not None:
            await self._server.stop()


def deploy(config: PhalanxConfig, *, listen: bool, keys: KeyDigests) -> serve.Application:
    """The Serve application of a configuration."""
    actor_options: dict[str, Any] = {"num_cpus": 0}
    environment: dict[str, str] = {}
    if config.cluster.ray_address is not None:
        # Processes of a local Ray inherit this environment; processes of a joined cluster do not.
        # An argument, because they hold secrets, and Ray writes a runtime_env to logs that all users read.
        environment = {k: v for k, v in os.environ.items() if k.startswith("OTEL_")}
        if listen or config.cluster.fetch_weights:
            # This node has serve.host and the model. Ray gives each node a resource with the node's address.
            actor_options["resources"] = {f"node:{node_address()}": NODE_SHARE}
    deployment: Any = Ingress  # the decorator makes it a serve.Deployment
    options = deployment.options(
        ray_actor_options=actor_options,
        num_replicas=config.serve.replicas,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=config.serve.drain_timeout_s + KILL_AFTER_S,
    )
    app: serve.Application = options.bind(config, listen=listen, keys=keys, environment=environment)
    return app
