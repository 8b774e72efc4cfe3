"""The routes /metrics for Prometheus, /ranks and /experts as JSON. Knows nothing of the counting."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.responses import Response

from cluster.api.answer.events import to_json
from cluster.api.backend import EngineBackend
from cluster.api.routes.readiness import not_serving
from cluster.api.routes.shared_answer import SharedAnswer
from cluster.api.settings import ApiSettings
from cluster.errors import EngineDeadError, ServingError
from cluster.metrics.metrics import CONTENT_TYPE, IngressMetrics

logger = logging.getLogger(__name__)
T = TypeVar("T")


def add_metrics_routes(
    app: FastAPI,
    backend_provider: Callable[[], EngineBackend],
    settings: ApiSettings,
    metrics: IngressMetrics,
) -> None:
    """Add the routes; `metrics` has the counts of this ingress."""

    shared_text = SharedAnswer(
        partial(_text, backend_provider, settings, metrics), settings.stats_fresh_s
    )
    shared_figures = SharedAnswer(
        partial(_figures, backend_provider, settings), settings.stats_fresh_s
    )

    @app.get("/metrics")
    async def prometheus_metrics() -> Response:
        """Prometheus text, at most serve.stats_fresh_s old. If the ranks do not answer, it has no figures of ranks."""
        return Response(await shared_text.get(), media_type=CONTENT_TYPE)

    @app.get("/ranks")
    async def ranks() -> Response:
        """The ranks' counters and gauges, at most serve.stats_fresh_s old; a reader takes rates from two answers.

        `time` (Unix seconds) is the clock for rates. Counters since the start: prompt_tokens, generation_tokens,
        preemptions, prefix_cache_queries, prefix_cache_hits, steps, idle_steps, drafts (times that a sequence had draft
        tokens in a step), draft_tokens, accepted_tokens, kv_restored_host and kv_restored_disk (prompt tokens that were
        loaded into the device, by where they were found), step_seconds by part. Gauges:
        running, waiting, kv_cache_usage (1 = all blocks), kv_waiting (requests that wait for a load; null = no KV
        outside the device), prefill_cap (most prompt tokens of a rank in a step in which a rank decodes; null = no
        limit). `epoch` counts the rebuilds of the group.
        `silent_ranks`: ranks that did not answer in time. `groups` as in /ready.
        """
        return Response(await shared_figures.get(), media_type="application/json")

    @app.get("/experts")
    async def experts() -> Response:
        """Where the experts of each group are, and the recent load of each expert; of groups with one rank too.

        Each entry of `groups` is what `experts.map` takes: `starts` has the first slot of each rank, `layers` by number
        the expert of every slot and the rows of each expert, those of older steps with less weight.
        """
        layouts = await backend_provider().expert_layouts()
        content = {"groups": [layout.to_json() for layout in layouts]}
        return Response(to_json(content), media_type="application/json")


async def _text(
    provider: Callable[[], EngineBackend], settings: ApiSettings, metrics: IngressMetrics
) -> bytes:
    own = metrics.snapshot()
    no_groups: list[dict[str, Any]] = []
    no_stats: list[dict[str, Any]] = []
    try:
        backend = provider()
    except ServingError as error:
        logger.warning("metrics without the ranks: %r", error)
        return metrics.render([])
    metrics.set_model_name(backend.model_name)
    timeout_s = settings.stats_timeout_s
    total, groups, stats = await asyncio.gather(
        _within(timeout_s, backend.ingress_metrics(own), own, "other ingresses"),
        _within(timeout_s, backend.groups(), no_groups, "groups"),
        _within(timeout_s, backend.rank_stats(), no_stats, "ranks"),
    )
    return metrics.render(stats, total, groups)


async def _figures(provider: Callable[[], EngineBackend], settings: ApiSettings) -> bytes:
    backend = provider()
    groups = await _within(settings.stats_timeout_s, backend.groups(), [], "groups")
    try:
        async with asyncio.timeout(settings.stats_timeout_s):
            stats = await backend.rank_stats()
    except (EngineDeadError, TimeoutError) as error:
        reason = not_serving(groups) or str(error) or "the ranks do not answer"
        raise EngineDeadError(reason) from error
    silent = [values["rank"] for values in stats if values.get("silent")]
    if stats and len(silent) == len(stats):
        raise EngineDeadError(not_serving(groups) or "the ranks do not answer")
    return to_json(
        {
            "time": time.time(),
            "model": backend.model_name,
            "groups": groups,
            "ranks": [
                _rank_fields(rank, values)
                for rank, values in enumerate(stats)
                if not values.get("silent")
            ],
            "silent_ranks": silent,
        }
    )


async def _within(timeout_s: float, answer: Awaitable[T], default: T, what: str) -> T:
    """Return an answer, or `default` if it does not come in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except (ServingError, TimeoutError) as error:
        logger.warning("figures without the %s: %r", what, error)
        return default


# Field of /ranks -> what it is before a rank has counted any.
_RANK_FIELDS: dict[str, Any] = {
    "epoch": 0,
    "running": 0,
    "waiting": 0,
    "kv_cache_usage": 0.0,
    "kv_waiting": None,
    "prefill_cap": None,
    "prompt_tokens": 0,
    "generation_tokens": 0,
    "prefix_cache_queries": 0,
    "prefix_cache_hits": 0,
    "preemptions": 0,
    "steps": 0,
    "idle_steps": 0,
    "drafts": 0,
    "draft_tokens": 0,
    "accepted_tokens": 0,
    "kv_restored_host": 0,
    "kv_restored_disk": 0,
    "step_seconds": {},
}


def _rank_fields(position: int, stats: dict[str, Any]) -> dict[str, Any]:
    values = {name: stats.get(name, default) for name, default in _RANK_FIELDS.items()}
    return {"rank": stats.get("rank", position), **values}
