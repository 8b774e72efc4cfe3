"""The routes of OpenAI's Responses API."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.api.backend import EngineBackend
from cluster.api.responses.factory import ResponseFactory
from cluster.api.responses.protocol import ResponsesRequest, parse_responses
from cluster.api.routes.generation import GenerationEndpoint, Prepared
from cluster.api.routes.openapi import body_schema


def add_responses_routes(
    app: FastAPI, endpoint: GenerationEndpoint, factory: ResponseFactory
) -> None:
    """Add the routes."""

    @app.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation with output items."""

        async def prepare(parsed: ResponsesRequest, backend: EngineBackend) -> Prepared:
            return await factory.prepare(parsed, backend, request.headers)

        return await endpoint.answer(request, parse_responses, prepare)
