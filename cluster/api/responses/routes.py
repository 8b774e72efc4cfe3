"""The routes of OpenAI's Responses API."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from cluster.api.answer.events import to_json
from cluster.api.auth import sender_of
from cluster.api.backend import EngineBackend
from cluster.api.offload import Offload
from cluster.api.request.draft import EngineFacts
from cluster.api.request.sender import Sender
from cluster.api.response import STREAM_HEADERS
from cluster.api.responses.background import BackgroundJob
from cluster.api.responses.draft import (
    References,
    ResponseDraft,
    draft_response,
    page_of_items,
)
from cluster.api.responses.event_log import EventLog
from cluster.api.responses.factory import ResponseFactory
from cluster.api.responses.input_items import query_flag, query_number
from cluster.api.responses.protocol import ResponsesRequest
from cluster.api.responses.store import ResponseStore, StoredResponse
from cluster.api.responses.writer import ResponseWriter
from cluster.api.routes.generation import Admitted, GenerationEndpoint, Prepared
from cluster.api.routes.openapi import body_schema
from cluster.api.run import Emit
from cluster.api.settings import ApiSettings
from cluster.errors import BadRequestError

_ONE = "/v1/responses/{response_id}"


def add_responses_routes(
    app: FastAPI,
    endpoint: GenerationEndpoint,
    offload: Offload,
    factory: ResponseFactory,
    store: ResponseStore,
    settings: ApiSettings,
) -> None:
    """Add the routes."""

    async def make_draft(body: bytes, facts: EngineFacts, sender: Sender) -> ResponseDraft:
        draft = await offload.on_body(draft_response, body, facts, sender=sender)
        if isinstance(draft, References):
            found = factory.find(draft, sender.key)
            draft = await offload.on_body(draft_response, body, facts, *found, sender=sender)
            assert isinstance(draft, ResponseDraft), "it has what it refers to"
        return draft

    @app.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        """Answer a conversation with output items."""
        in_background = False

        async def prepare(draft: ResponseDraft, backend: EngineBackend, sender: Sender) -> Prepared:
            nonlocal in_background
            in_background = bool(draft.request.background)
            return await factory.prepare(draft, backend, sender)

        admitted = await endpoint.admit(request, make_draft, prepare)
        if not in_background:
            return endpoint.respond(admitted)
        return _start(admitted, lambda emit: endpoint.run(admitted, request.scope, emit), store)

    _add_store_routes(app, offload, store, settings)


def _start(
    admitted: Admitted, run: Callable[[Emit], Awaitable[None]], store: ResponseStore
) -> Response:
    """Run a response in the background; its stream, if any, is one reader of its events."""
    writer, generation = admitted.writer, admitted.generation
    assert isinstance(writer, ResponseWriter), "the factory makes it"
    job = BackgroundJob(writer, streams=generation.stream)
    job.start(run)
    stored = store.attach(generation.response_id, job)
    if job.log is not None:
        return _stream(job.log, -1)
    return _json(stored.response)


def _add_store_routes(
    app: FastAPI, offload: Offload, store: ResponseStore, settings: ApiSettings
) -> None:
    def find(response_id: str, request: Request) -> StoredResponse:
        return store.find(response_id, sender_of(request, settings).key)

    @app.get(_ONE, openapi_extra=_query("stream", "starting_after"))
    async def get_response(response_id: str, request: Request) -> Response:
        """A kept response; with stream=true the events of a response that runs or ran in the background."""
        stored = find(response_id, request)
        if not query_flag(request.query_params, "stream"):
            return _json(stored.response)
        if stored.job is None or stored.job.log is None:
            raise BadRequestError(
                "only responses that were created with background and stream can be streamed again",
                param="stream",
            )
        return _stream(stored.job.log, query_number(request.query_params, "starting_after", -1))

    @app.delete(_ONE)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget a response; one that runs is cancelled."""
        stored = find(response_id, request)
        if stored.job is not None:
            await stored.job.cancel()
        store.delete(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @app.post(f"{_ONE}/cancel")
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Cancel a response in the background; without effect after its end."""
        stored = find(response_id, request)
        if stored.job is None:
            raise BadRequestError(
                "only responses that were created with background can be cancelled; "
                "close the connection of other responses",
                param="response_id",
            )
        await stored.job.cancel()
        return _json(find(response_id, request).response)

    @app.get(f"{_ONE}/input_items", openapi_extra=_query("limit", "order", "after"))
    async def list_input_items(response_id: str, request: Request) -> Response:
        """The conversation that a response answers, in pages."""
        items, query = find(response_id, request).items, dict(request.query_params)
        page = await offload.run(page_of_items, items, query, sender=sender_of(request, settings))
        return Response(page, media_type="application/json")


def _query(*names: str) -> dict[str, Any]:
    """Return `openapi_extra` of a route with these fields in its query."""
    fields = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]
    return {"parameters": fields}


def _stream(log: EventLog, after: int) -> Response:
    headers = {name.decode(): value.decode() for name, value in STREAM_HEADERS}
    return StreamingResponse(log.follow(after), headers=headers)


def _json(content: dict[str, Any]) -> Response:
    return Response(to_json(content), media_type="application/json")
