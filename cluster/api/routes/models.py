"""GET /v1/models and /v1/models/{model}: the model and its adapters, in the shape of OpenAI's or Anthropic's API."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.api.answer.events import to_json
from cluster.api.backend import EngineBackend
from cluster.api.request.draft import EngineFacts, check_model

_VERSION = "anthropic-version"
"""Header of all clients of Anthropic's API."""


def add_model_routes(app: FastAPI, backend_provider: Callable[[], EngineBackend]) -> None:
    """Add the routes."""
    started = int(time.time())

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The served model and its adapters, as a list."""
        backend = backend_provider()
        names = [backend.model_name, *backend.adapters]
        cards = [_card(request, backend, name, started) for name in names]
        if _VERSION in request.headers:
            ids = {"first_id": names[0], "last_id": names[-1]}
            return _json({"data": cards, "has_more": False, **ids})
        return _json({"object": "list", "data": cards})

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        """The served model, or an adapter."""
        backend = backend_provider()
        check_model(model, EngineFacts.of(backend))
        return _json(_card(request, backend, model, started))


def _card(request: Request, backend: EngineBackend, name: str, started: int) -> dict[str, Any]:
    folder = backend.adapters.get(name)
    if _VERSION in request.headers:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": backend.max_model_len,
            "max_tokens": backend.max_model_len,
        }
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "phalanx",
        "root": name if folder is None else folder,
        "parent": None if folder is None else backend.model_name,
        "max_model_len": backend.max_model_len,
    }


def _json(content: dict[str, Any]) -> Response:
    return Response(to_json(content), media_type="application/json")
