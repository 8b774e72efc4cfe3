"""The routes of models that answer with vectors or scores: which ones a task has, and how each is drafted."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from cluster.api.backend import EngineBackend
from cluster.api.offload import Offload
from cluster.api.pooling.draft import (
    PoolingDraft,
    draft_classes,
    draft_embedding,
    draft_pooling,
    draft_reranking,
    draft_scores,
)
from cluster.api.pooling.factory import prepare_pooling
from cluster.api.pooling.fields import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from cluster.api.request.draft import Drafter, EngineFacts
from cluster.api.request.sender import Sender
from cluster.api.routes.generation import GenerationEndpoint, Prepared
from cluster.api.routes.openapi import body_schema
from cluster.api.settings import ApiSettings
from workers.specs.pooling import PoolingTask

MakeDraft = Callable[[Drafter, dict[str, Any], EngineFacts], PoolingDraft]


class PoolingRoute(NamedTuple):
    """A route: the tasks of models that have it, its fields, its draft, and a line for the OpenAPI document."""

    tasks: tuple[PoolingTask, ...]
    fields: type[BaseModel]
    draft: MakeDraft
    summary: str


_SCORE = PoolingRoute(("embed", "score"), ScoreRequest, draft_scores, "Score pairs of texts.")
_RERANK = PoolingRoute(
    ("embed", "score"), RerankRequest, draft_reranking, "Order documents by a query."
)
ROUTES: dict[str, PoolingRoute] = {
    "/v1/embeddings": PoolingRoute(
        ("embed",), EmbeddingRequest, draft_embedding, "Embed texts or token ids."
    ),
    "/pooling": PoolingRoute(
        ("embed", "classify", "score"), PoolingRequest, draft_pooling, "What the model makes."
    ),
    "/classify": PoolingRoute(("classify",), ClassifyRequest, draft_classes, "Classify texts."),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
}


def routes_of(task: PoolingTask | None) -> dict[str, PoolingRoute]:
    """Return the routes of a model, by path; None for one that generates."""
    return {path: route for path, route in ROUTES.items() if task in route.tasks}


def add_pooling_routes(
    app: FastAPI, endpoint: GenerationEndpoint, offload: Offload, settings: ApiSettings
) -> None:
    """Add the routes of the served model."""
    assert settings.pooling is not None, "the model generates"

    async def prepare(draft: PoolingDraft, backend: EngineBackend, sender: Sender) -> Prepared:
        return prepare_pooling(draft, backend, sender, settings)

    def add(path: str, route: PoolingRoute) -> None:
        async def answer(request: Request) -> Response:
            return await endpoint.answer(request, offload.drafts(route.draft), prepare)

        app.add_api_route(
            path,
            answer,
            methods=["POST"],
            name=path.strip("/").replace("/", "_"),
            description=route.summary,
            openapi_extra=body_schema(route.fields),
        )

    for path, route in routes_of(settings.pooling.task).items():
        add(path, route)
