"""POST /v1/messages and /v1/messages/count_tokens, in the shapes of Anthropic's API."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.api.answer.events import to_json
from cluster.api.auth import sender_of
from cluster.api.backend import EngineBackend
from cluster.api.messages.fields import (
    CountTokensRequest,
    MessagesRequest,
    parse_count_request,
    parse_messages_request,
)
from cluster.api.messages.translate import chat_request
from cluster.api.messages.writer import MessageWriter
from cluster.api.offload import Offload
from cluster.api.request.draft import Draft, Drafter, EngineFacts
from cluster.api.request.generation_factory import GenerationFactory
from cluster.api.request.sender import Sender
from cluster.api.request.uploads import Uploads
from cluster.api.routes.generation import GenerationEndpoint, Prepared
from cluster.api.routes.openapi import body_schema
from cluster.api.settings import ApiSettings


@dataclass(frozen=True)
class MessageDraft:
    """The draft of a messages request, and its max_tokens."""

    chat: Draft
    max_tokens: int

    @property
    def num_choices(self) -> int:
        """See DraftedRequest."""
        return 1

    @property
    def num_image_bytes(self) -> int:
        """See DraftedRequest."""
        return self.chat.num_image_bytes

    @property
    def num_tokens(self) -> int:
        """See DraftedRequest."""
        (room,) = self.chat.max_tokens
        return self.chat.num_tokens - room + min(self.max_tokens, room)


def add_messages_routes(
    app: FastAPI,
    endpoint: GenerationEndpoint,
    offload: Offload,
    uploads: Uploads,
    factory: GenerationFactory,
    backend_provider: Callable[[], EngineBackend],
    settings: ApiSettings,
) -> None:
    """Add the routes."""

    async def prepare(draft: MessageDraft, backend: EngineBackend, sender: Sender) -> Prepared:
        return await prepare_message(factory, draft, backend, sender)

    @app.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer a conversation in the shape of Anthropic's API."""

        return await endpoint.answer(request, offload.drafts(draft_message), prepare)

    @app.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """The number of tokens of a prompt."""
        async with uploads.body(request) as body:
            facts, sender = EngineFacts.of(backend_provider()), sender_of(request, settings)
            num_tokens = await offload.on_body(_num_tokens, body, facts, sender=sender)
        return Response(to_json({"input_tokens": num_tokens}), media_type="application/json")


def draft_message(drafter: Drafter, body: dict[str, Any], facts: EngineFacts) -> MessageDraft:
    """Return the draft of a body of /v1/messages. Raises BadRequestError."""
    request = parse_messages_request(body)
    return MessageDraft(drafter.chat_request(chat_request(request), facts), request.max_tokens)


def _num_tokens(drafter: Drafter, body: dict[str, Any], facts: EngineFacts) -> int:
    return drafter.num_chat_tokens(chat_request(parse_count_request(body)), facts)


async def prepare_message(
    factory: GenerationFactory,
    draft: MessageDraft,
    backend: EngineBackend,
    sender: Sender,
) -> Prepared:
    """Return the generation of a messages request and the writer of its answer."""
    generation = await factory.generation(draft.chat, backend, sender, id_prefix="msg_")
    choice = generation.choices[0]
    # The chat request has no limit, so this is the room that the prompt leaves.
    room = choice.params.max_tokens
    choice.params = replace(choice.params, max_tokens=min(draft.max_tokens, room))
    writer = MessageWriter(generation, max_tokens=draft.max_tokens, request_id=sender.request_id)
    return generation, writer
