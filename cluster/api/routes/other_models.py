"""Answers routes of other kinds of models: a 400 with what this model lacks and the routes that it has."""

from collections.abc import Collection

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.errors import BadRequestError
from workers.specs.pooling import PoolingSpec

# Path -> what the answer would hold.
OTHER_ROUTES = {
    "/v1/completions": "text",
    "/v1/chat/completions": "text",
    "/v1/responses": "text",
    "/v1/messages": "text",
    "/v1/messages/count_tokens": "text",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
    "/classify": "classes",
    "/score": "scores",
    "/v1/score": "scores",
    "/rerank": "scores",
    "/v1/rerank": "scores",
    "/v2/rerank": "scores",
    "/v1/moderations": "moderation",
    "/v1/audio/speech": "audio",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/translations": "translations",
    "/v1/images/generations": "images",
    "/v1/images/edits": "images",
    "/v1/images/variations": "images",
}
_MAKES = {"embed": "makes embeddings", "classify": "classifies texts", "score": "scores texts"}


def add_other_routes(app: FastAPI, pooling: PoolingSpec | None) -> None:
    """Add a route for each path that `app` has not; the OpenAPI document has none of them."""
    has = _answer_paths(app)

    async def refuse(request: Request) -> Response:
        error = of_another_kind(request.url.path, pooling, has)
        error.message += ", and GET /openapi.json lists all routes"
        raise error

    for path in OTHER_ROUTES:
        if path not in has:
            app.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)


def of_another_kind(
    path: str, pooling: PoolingSpec | None, has: Collection[str]
) -> BadRequestError:
    """Return the error for a route of OTHER_ROUTES that the model has not. has: the routes that it has."""
    makes = "generates text"
    if pooling is not None:
        makes = f"{_MAKES[pooling.task]} (model.task = {pooling.task})"
    return BadRequestError(
        f"{path}: this model {makes}, the server has no {OTHER_ROUTES[path]}; it answers POST {', '.join(has)}",
        code="unsupported_route",
    )


def _answer_paths(app: FastAPI) -> list[str]:
    """Return the POST routes so far without path parameters."""
    found = []
    for route in app.routes:
        path, methods = getattr(route, "path", ""), getattr(route, "methods", None) or ()
        if "{" not in path and "POST" in methods:
            found.append(path)
    return found
