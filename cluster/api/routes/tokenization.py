"""POST /tokenize and /detokenize, in the shapes of vLLM.

A body of /v1/completions or /v1/chat/completions returns the tokens that a generation would have.
"""

from array import array
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from cluster.api.answer.events import to_json
from cluster.api.auth import sender_of
from cluster.api.backend import EngineBackend
from cluster.api.offload import Offload
from cluster.api.request.draft import Drafter, EngineFacts, check_model
from cluster.api.request.field_schemas import MESSAGES, TOKEN_IDS
from cluster.api.request.protocol import (
    as_bad_request,
    parse_chat,
    parse_completion,
)
from cluster.api.request.tool_options import parse_tool_options
from cluster.api.request.uploads import Uploads
from cluster.api.routes.openapi import body_schema
from cluster.api.settings import ApiSettings
from cluster.errors import BadRequestError

Work = Callable[[Drafter, dict[str, Any], EngineFacts], bytes]


class TokenizeRequest(BaseModel):
    """POST /tokenize. All other fields count as in a generation request."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
    )

    model: str | None = Field(None, description="The served model; null = the one there is.")
    prompt: Any = Field(
        None,
        description="A string, or token ids. This or messages.",
        json_schema_extra={"anyOf": [{"type": "string"}, TOKEN_IDS]},
    )
    messages: Any = Field(
        None, description="[{role, content}], rendered as a chat.", json_schema_extra=MESSAGES
    )
    add_special_tokens: bool | None = Field(
        None, description="By default yes for a prompt, no for messages: templates write them."
    )
    return_token_strs: bool | None = Field(None, description="How the vocabulary writes each.")


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = Field(None, description="The served model; null = the one there is.")
    tokens: list[int] = Field(description="Token ids.", fail_fast=True)


def add_tokenization_routes(
    app: FastAPI,
    backend_provider: Callable[[], EngineBackend],
    offload: Offload,
    uploads: Uploads,
    settings: ApiSettings,
) -> None:
    """Add the routes."""

    async def answer(work: Work, request: Request) -> Response:
        async with uploads.body(request) as body:
            facts, sender = EngineFacts.of(backend_provider()), sender_of(request, settings)
            content = await offload.on_body(work, body, facts, sender=sender)
        return Response(content, media_type="application/json")

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        return await answer(_tokenize, request)

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await answer(_detokenize, request)


def _tokenize(drafter: Drafter, body: dict[str, Any], facts: EngineFacts) -> bytes:
    asked = _parse(TokenizeRequest, body)
    check_model(asked.model, facts)
    token_ids = _token_ids(asked, body, drafter).tolist()
    strings = drafter.tokenizer.token_strings(token_ids) if asked.return_token_strs else None
    return to_json(
        {
            "count": len(token_ids),
            "max_model_len": facts.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )


def _detokenize(drafter: Drafter, body: dict[str, Any], facts: EngineFacts) -> bytes:
    asked = _parse(DetokenizeRequest, body)
    check_model(asked.model, facts)
    drafter.tokenizer.check_token_ids(asked.tokens, "tokens")
    return to_json({"prompt": drafter.tokenizer.decode(asked.tokens)})


def _token_ids(asked: TokenizeRequest, body: dict[str, Any], drafter: Drafter) -> "array[int]":
    if asked.messages is not None:
        if asked.prompt is not None:
            raise BadRequestError("prompt and messages exclude each other", param="prompt")
        request = parse_chat(body)
        offer = parse_tool_options(request, drafter.settings)
        tools = None if offer is None else offer.definitions
        return drafter.prompts.chat(request, None, tools).token_ids
    found = drafter.prompts.completion(parse_completion(body), keep=None)
    if len(found) != 1:
        raise BadRequestError("prompt must be a single one", param="prompt")
    return found[0].token_ids


def _parse(model: type[BaseModel], body: dict[str, Any]) -> Any:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise as_bad_request(error) from None
