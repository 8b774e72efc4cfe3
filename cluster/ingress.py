"""The Ray Serve deployment: an HTTP server process in front of the ranks. All of HTTP is in cluster/api."""

import asyncio
from typing import Any

from ray import serve

from cluster.api.app import create_app
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import load_default_sampling, load_tokenizer
from cluster.config import PhalanxConfig
from cluster.engine_client import EngineClient
from cluster.http_server import HttpServer


@serve.deployment(
    # Admission is ours: Serve must neither queue nor refuse before we have looked.
    max_ongoing_requests=100_000,
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=5,
)
@serve.ingress()
class Ingress:
    """One ingress replica; ready when the ranks are.

    listen: answer on serve.host:serve.port itself; otherwise requests come through Serve's proxies.
    """

    async def __init__(self, config: PhalanxConfig, *, listen: bool):
        self._client = EngineClient(config)
        # The tokenizer's import takes seconds; the ranks come up meanwhile.
        connected = asyncio.create_task(self._client.connect())
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path)
        settings = ApiSettings(
            max_body_bytes=config.serve.limits.max_body_bytes,
            default_sampling=load_default_sampling(config.model.path),
        )
        self._app = create_app(lambda: self._client, tokenizer, settings)
        await connected
        self._server: HttpServer | None = None
        if listen:
            self._server = HttpServer(self._app, config.serve.host, config.serve.port)
            self._server.start()

    def __serve_build_asgi_app__(self) -> Any:
        """The application for Serve's proxies."""
        return self._app

    def check_health(self) -> None:
        """Asked by Serve from time to time; a replica that raises is replaced."""
        if self._server is not None:
            self._server.check()

    async def __del__(self) -> None:
        if getattr(self, "_server", None) is not None:
            await self._server.stop()
        await self._client.close()
