"""The fields of POST /v1/messages and /v1/messages/count_tokens: types and bounds. Knows nothing of chat requests.

Unknown fields are ignored, because clients send new ones with every version. Known fields that need a service of
Anthropic are refused.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from cluster.api.request.protocol import as_bad_request
from cluster.api.request.unsupported import refuse_unsupported

_INT32_MAX = 2**31 - 1
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Request = TypeVar("_Request", bound="CountTokensRequest")

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": (), "thread": ()}

# For the OpenAPI document: schemas of the fields that `conversation` and `tools` check instead of pydantic.
_BLOCKS: dict[str, JsonValue] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {
                "enum": [
                    *("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")
                ]
            }
        },
    },
}
_MESSAGES: dict[str, JsonValue] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [{"type": "string"}, _BLOCKS]},
        },
    },
}
_SYSTEM: dict[str, JsonValue] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
        {"type": "null"},
    ]
}
_TOOLS: dict[str, JsonValue] = {
    "anyOf": [
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "input_schema"],
                "properties": {
                    "name": {"type": "string"},
                    "description": {"type": ["string", "null"]},
                    "input_schema": {"type": "object"},
                },
            },
        },
        {"type": "null"},
    ]
}


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens: the fields that the prompt depends on."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = Field(None, description="The served model; may be left out.")
    messages: Any = Field(
        description="[{role: user | assistant, content: string or blocks}]",
        json_schema_extra=_MESSAGES,
    )
    system: Any = Field(None, description="A string or text blocks.", json_schema_extra=_SYSTEM)
    tools: Any = Field(
        None, description="[{name, description, input_schema}]", json_schema_extra=_TOOLS
    )
    tool_choice: dict[str, Any] | None = Field(
        None, description="{type: auto | any | tool | none, name, disable_parallel_tool_use}"
    )
    thinking: dict[str, Any] | None = Field(
        None, description="{type: enabled | disabled | adaptive, budget_tokens, display}"
    )
    output_config: dict[str, Any] | None = Field(
        None, description="{effort: low to max, format: {type: json_schema, schema}}"
    )
    output_format: dict[str, Any] | None = Field(
        None, description="The older name of output_config.format."
    )


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(
        ge=1, le=_INT32_MAX, description="Cut to what the prompt leaves of the context."
    )
    temperature: _Number | None = Field(None, ge=0, le=2, description="0 = greedy.")
    top_p: _Number | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT32_MAX, description="0 or -1 = off.")
    stop_sequences: list[str] | None = Field(None, fail_fast=True)
    stream: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="As in other routes.")
    metadata: Any = Field(None, description="user_id names the session; the rest is ignored.")
    service_tier: Any = Field(None, description="Accepted and ignored.")


def parse_messages_request(body: dict[str, Any]) -> MessagesRequest:
    """Check types and bounds of a messages request."""
    return _parse(MessagesRequest, body)


def parse_count_request(body: dict[str, Any]) -> CountTokensRequest:
    """Check types of a request to count tokens."""
    return _parse(CountTokensRequest, body)


def _parse(model: type[_Request], body: dict[str, Any]) -> _Request:
    refuse_unsupported(body, _UNSUPPORTED)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise as_bad_request(error) from None
