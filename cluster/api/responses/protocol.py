"""The fields of a request to /v1/responses: types, bounds, defaults. Knows nothing of chat requests or tokenizers."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.api.request.field_schemas import TOOL_CHOICE
from cluster.api.request.protocol import GenerationRequest, StreamOptions, as_bad_request
from cluster.api.request.unsupported import refuse_unsupported
from cluster.api.responses.field_schemas import FUNCTIONS, INPUT
from cluster.errors import BadRequestError, UnsupportedParameterError

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
_INT32_MAX = 2**31 - 1
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512  # of metadata
# Values of `include` for results of hosted tools and for images, which no answer here has.
_OF_OTHER_ITEMS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
# Field -> the values that change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "prompt_logprobs": (False,),
    "use_beam_search": (False,),
}
# Fields of chat completions -> the field of this route.
_OTHER_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": f"include: [{LOGPROBS}]",
    "truncate_prompt_tokens": "truncation",
}
# Fields of GenerationRequest that this route does not take.
_NOT_TAKEN = (
    *("n", "best_of", "prompt_logprobs", "response_format", "truncate_prompt_tokens"),
    *("return_tokens_as_token_ids", "return_token_ids", "request_id"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "guided_whitespace_pattern",
)


def _change_schema(schema: dict[str, Any]) -> None:
    """Leave out of the OpenAPI document what the route does not take, and mark `input` as required."""
    for name in _NOT_TAKEN:
        del schema["properties"][name]
    schema["required"] = ["input"]
    del schema["properties"]["input"]["default"]


class ResponseStreamOptions(StreamOptions):
    """`stream_options`."""

    include_obfuscation: bool | None = Field(
        None, description="Accepted; no event has an `obfuscation` field."
    )


class ReasoningOptions(BaseModel):
    """`reasoning`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="For the chat template; none = no thinking, if the chat template can turn it off.",
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted; the answer has the reasoning itself, no summary."
    )


class TextOptions(BaseModel):
    """`text`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: dict[str, Any] | None = Field(
        None, description="{type: text | json_object | json_schema, name, schema, strict}"
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Only medium, which changes nothing."
    )


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses."""

    model_config = ConfigDict(json_schema_extra=_change_schema)

    input: Any = Field(
        None,
        description="A text, or items: messages, function calls and their outputs, reasoning.",
        json_schema_extra=INPUT,
    )
    instructions: str | None = Field(None, description="The first system message.")
    previous_response_id: str | None = Field(
        None, description="Go on after a kept response: its input and output come first."
    )
    store: bool | None = Field(None, description="false = the response is not kept.")
    background: bool | None = Field(None, description="Run without a connection; needs the store.")
    max_output_tokens: int | None = Field(
        None, ge=1, le=_INT32_MAX, description="Reasoning included."
    )
    max_tool_calls: int | None = Field(
        None, ge=1, le=_INT32_MAX, description="Of hosted tools; there are none."
    )
    top_logprobs: int | None = Field(
        None, ge=0, description=f"Alternatives; with include: {LOGPROBS}."
    )
    include: list[str] | None = Field(None, fail_fast=True)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Any = Field(
        None,
        description="[{type: function, name, description, parameters, strict}]",
        json_schema_extra=FUNCTIONS,
    )
    tool_choice: Any = Field(
        None,
        description="none | auto | required | {type: function, name} | "
        "{type: allowed_tools, mode, tools: [{type: function, name}]}",
        json_schema_extra=TOOL_CHOICE,
    )
    parallel_tool_calls: bool | None = Field(None, description="false = at most one call.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto = drop tokens from the beginning of a prompt that does not fit."
    )
    metadata: dict[str, str] | None = Field(
        None, description="Echoed: up to 16 pairs, keys of 64 and values of 512 characters."
    )
    stream_options: ResponseStreamOptions | None = None
    include_reasoning: bool | None = Field(None, description="false = thoughts are left out.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template; they win over reasoning.effort."
    )
    enable_thinking: bool | None = Field(None, description="false = no thought before the answer.")
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="Limits of images in pixels: {min_pixels, max_pixels}."
    )
    user: str | None = Field(None, description="Echoed; names the session, see /v1/completions.")
    safety_identifier: str | None = Field(None, description="Echoed.")
    prompt_cache_key: str | None = Field(
        None, description="Echoed; names the session, before user. Prefixes are cached without it."
    )
    service_tier: str | None = Field(None, description="Accepted; every answer has `default`.")

    @property
    def shows_logprobs(self) -> bool:
        """Whether the output text has log-probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def keeps(self) -> bool:
        """Whether the client wants the response to be kept."""
        return self.store is not False


def parse_responses(body: dict[str, Any]) -> ResponsesRequest:
    """Check types and bounds of a request, except of items and tools."""
    for name, other in _OTHER_NAMES.items():
        if body.get(name) is not None:
            raise UnsupportedParameterError(
                f"{name} is no field of /v1/responses; use {other}", param=name
            )
    refuse_unsupported(body, _UNSUPPORTED)
    body = {name: value for name, value in body.items() if name not in _NOT_TAKEN}
    try:
        request = ResponsesRequest.model_validate(body)
    except ValidationError as error:
        raise as_bad_request(error) from None
    if request.stream_options is not None and not request.stream:
        raise BadRequestError(
            "stream_options is only allowed with stream = true", param="stream_options"
        )
    _check_include(request.include or [])
    _check_metadata(request.metadata or {})
    return request


def _check_include(include: list[str]) -> None:
    known = (LOGPROBS, ENCRYPTED_REASONING, *_OF_OTHER_ITEMS)
    for i, name in enumerate(include):
        if name not in known:
            raise BadRequestError(
                f"include.{i} must be one of {', '.join(known)}", param=f"include.{i}"
            )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _MAX_PAIRS:
        raise BadRequestError(
            f"metadata has {len(metadata)} pairs, at most {_MAX_PAIRS} are allowed",
            param="metadata",
        )
    for key, value in metadata.items():
        if len(key) > _MAX_KEY:
            raise BadRequestError(
                f"metadata: the key {key[:_MAX_KEY]!r}... has more than {_MAX_KEY} characters",
                param="metadata",
            )
        if len(value) > _MAX_VALUE:
            raise BadRequestError(
                f"metadata.{key} has {len(value)} characters, at most {_MAX_VALUE} are allowed",
                param=f"metadata.{key}",
            )
