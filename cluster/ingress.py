"""The Ray Serve deployment: an HTTP server process in front of the ranks. All of HTTP is in cluster/api."""

import asyncio
from typing import Any

from ray import serve

from cluster.api.app import create_app
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import load_default_sampling, load_tokenizer
from cluster.config import PhalanxConfig
from cluster.engine_client import EngineClient


@serve.deployment(
    # Admission is ours: Serve must neither queue nor refuse before we have looked.
    max_ongoing_requests=100_000,
    ray_actor_options={"num_cpus": 0.1},
    graceful_shutdown_timeout_s=5,
)
@serve.ingress()
class Ingress:
    """One ingress replica; ready when the ranks are."""

    async def __init__(self, config: PhalanxConfig):
        self._config = config
        self._client = EngineClient(config)
        # The tokenizer's import takes seconds; the ranks come up meanwhile.
        connected = asyncio.create_task(self._client.connect())
        self._tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path)
        await connected

    def __serve_build_asgi_app__(self) -> Any:
        """The FastAPI application, made in the replica once the ranks are known."""
        settings = ApiSettings(
            max_body_bytes=self._config.serve.max_body_bytes,
            default_sampling=load_default_sampling(self._config.model.path),
        )
        return create_app(lambda: self._client, self._tokenizer, settings)
