"""Answers routes of other kinds of models: a 400 with what this model lacks and the routes that it has.

Clients take a 404 for a wrong URL; the error class of a 400 names the cause.
"""

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.errors import BadRequestError

# Path -> what the answer would hold.
OTHER_ROUTES = {
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


def add_other_routes(app: FastAPI) -> None:
    """Add a route for each path; the OpenAPI document has none of them."""
    documented = ", ".join(_generation_paths(app))

    async def refuse(request: Request) -> Response:
        lacks = OTHER_ROUTES[request.url.path]
        raise BadRequestError(
            f"{request.url.path}: this model generates text, the server has no {lacks}; "
            f"it answers POST {documented}, and GET /openapi.json lists all routes",
            code="unsupported_route",
        )

    for path in OTHER_ROUTES:
        app.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)


def _generation_paths(app: FastAPI) -> list[str]:
    """Return the POST routes under /v1 so far without path parameters."""
    found = []
    for route in app.routes:
        path, methods = getattr(route, "path", ""), getattr(route, "methods", None) or ()
        if path.startswith("/v1/") and "{" not in path and "POST" in methods:
            found.append(path)
    return found
