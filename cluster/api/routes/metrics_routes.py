"""The routes /metrics for Prometheus, and /ranks as JSON. Knows nothing of the counting."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from cluster.api.answer.events import to_json
from cluster.api.backend import EngineBackend
from cluster.api.settings import ApiSettings
from cluster.errors import EngineDeadError, ServingError
from cluster.metrics.metrics import CONTENT_TYPE, IngressMetrics

logger = logging.getLogger(__name__)


def add_metrics_routes(
    app: FastAPI,
    backend_provider: Callable[[], EngineBackend],
    settings: ApiSettings,
    metrics: IngressMetrics,
) -> None:
    """Add the routes; `metrics` has the counts of this ingress."""

    @app.get("/metrics")
    async def prometheus_metrics() -> Response:
        """Prometheus text. If the ranks do not answer, it has no figures of ranks."""
        stats: list[dict[str, Any]] = []
        total = metrics.snapshot()
        try:
            backend = backend_provider()
            metrics.set_model_name(backend.model_name)
            async with asyncio.timeout(settings.stats_timeout_s):
                total = await backend.ingress_metrics(total)
                stats = await backend.rank_stats()
        except (ServingError, TimeoutError) as error:
            logger.warning("metrics without the ranks: %r", error)
        return Response(metrics.render(stats, total), media_type=CONTENT_TYPE)

    @app.get("/ranks")
    async def ranks() -> Response:
        """The ranks' counters and gauges now; a reader takes rates from two answers.

        `time` (Unix seconds) is the clock for rates. Counters since the start: prompt_tokens, generation_tokens,
        preemptions, prefix_cache_queries, prefix_cache_hits, steps, idle_steps, step_seconds by part. Gauges:
        running, waiting, kv_cache_usage (1 = all blocks). `epoch` counts the rebuilds of the group.
        """
        backend = backend_provider()
        try:
            stats = await asyncio.wait_for(backend.rank_stats(), settings.stats_timeout_s)
        except TimeoutError as error:
            raise EngineDeadError("the ranks do not answer") from error
        return Response(
            to_json(
                {
                    "time": time.time(),
                    "model": backend.model_name,
                    "ranks": [_rank_fields(rank, values) for rank, values in enumerate(stats)],
                }
            ),
            media_type="application/json",
        )


# Field of /ranks -> what it is before a rank has counted any.
_RANK_FIELDS: dict[str, Any] = {
    "epoch": 0,
    "running": 0,
    "waiting": 0,
    "kv_cache_usage": 0.0,
    "prompt_tokens": 0,
    "generation_tokens": 0,
    "prefix_cache_queries": 0,
    "prefix_cache_hits": 0,
    "preemptions": 0,
    "steps": 0,
    "idle_steps": 0,
    "step_seconds": {},
}


def _rank_fields(position: int, stats: dict[str, Any]) -> dict[str, Any]:
    values = {name: stats.get(name, default) for name, default in _RANK_FIELDS.items()}
    return {"rank": stats.get("rank", position), **values}
