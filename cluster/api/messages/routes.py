"""POST /v1/messages and /v1/messages/count_tokens, in the shapes of Anthropic's API."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.api.answer.events import to_json
from cluster.api.backend import EngineBackend
from cluster.api.messages.fields import (
    CountTokensRequest,
    MessagesRequest,
    parse_count_request,
    parse_messages_request,
)
from cluster.api.messages.translate import chat_request
from cluster.api.messages.writer import MessageWriter
from cluster.api.record import REQUEST_ID
from cluster.api.request.generation_factory import GenerationFactory
from cluster.api.request.json_body import read_json_object
from cluster.api.request.protocol import ChatRequest
from cluster.api.routes.generation import GenerationEndpoint, Prepared
from cluster.api.routes.openapi import body_schema
from cluster.api.settings import ApiSettings


@dataclass(frozen=True)
class MessageRequest:
    """A messages request as a chat request, and its max_tokens."""

    chat: ChatRequest
    max_tokens: int

    @property
    def num_choices(self) -> int:
        """See ParsedRequest."""
        return 1


def add_messages_routes(
    app: FastAPI,
    endpoint: GenerationEndpoint,
    factory: GenerationFactory,
    backend_provider: Callable[[], EngineBackend],
    settings: ApiSettings,
) -> None:
    """Add the routes."""

    @app.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer a conversation in the shape of Anthropic's API."""

        async def prepare(parsed: MessageRequest, backend: EngineBackend) -> Prepared:
            request_id = str(request.scope.get(REQUEST_ID, ""))
            return await prepare_message(factory, parsed, backend, request.headers, request_id)

        return await endpoint.answer(request, parse_message, prepare)

    @app.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """The number of tokens of a prompt."""
        body = await read_json_object(request, settings)
        chat = chat_request(parse_count_request(body))
        num_tokens = await factory.num_chat_tokens(chat, backend_provider())
        return Response(to_json({"input_tokens": num_tokens}), media_type="application/json")


def parse_message(body: dict[str, Any]) -> MessageRequest:
    """Check the body of a messages request."""
    request = parse_messages_request(body)
    return MessageRequest(chat_request(request), request.max_tokens)


async def prepare_message(
    factory: GenerationFactory,
    parsed: MessageRequest,
    backend: EngineBackend,
    headers: Mapping[str, str],
    request_id: str,
) -> Prepared:
    """Return the generation of a messages request and the writer of its answer."""
    generation = await factory.chat(parsed.chat, backend, headers, id_prefix="msg_")
    choice = generation.choices[0]
    # The chat request has no limit, so this is the room that the prompt leaves.
    room = choice.params.max_tokens
    choice.params = replace(choice.params, max_tokens=min(parsed.max_tokens, room))
    writer = MessageWriter(generation, max_tokens=parsed.max_tokens, request_id=request_id)
    return generation, writer
