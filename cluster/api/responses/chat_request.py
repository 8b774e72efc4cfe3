"""Translates a request to /v1/responses to a chat request, and the errors of that back to the fields of the route.

So the answer is the one that chat completions would give. Knows nothing of answers.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cluster.api.request.protocol import ChatRequest, parse_chat
from cluster.api.responses.conversation import chat_messages
from cluster.api.responses.items import Item
from cluster.api.responses.protocol import ResponsesRequest
from cluster.api.responses.tools import chat_tool_choice, chat_tools
from cluster.errors import BadRequestError

# Fields with one name and meaning in both.
_SHARED = (
    *("model", "stream", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "bad_words", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "skip_special_tokens", "add_special_tokens", "priority", "cache_salt"),
    *("structured_outputs", "chat_template_kwargs", "enable_thinking", "include_reasoning"),
    *("parallel_tool_calls", "mm_processor_kwargs", "prompt_cache_key", "user"),
)
# Field of a chat request -> field of this route; the first pattern that matches counts.
_NAMES = (
    (re.compile(r"tools\.(\d+)\.function"), r"tools.\1"),
    (re.compile(r"tool_choice\.allowed_tools\.tools\.(\d+)\.function"), r"tool_choice.tools.\1"),
    (re.compile(r"tool_choice\.function"), "tool_choice"),
    (re.compile(r"response_format\.json_schema"), "text.format"),
    (re.compile(r"response_format"), "text.format"),
    (re.compile(r"(max_tokens|max_completion_tokens)$"), "max_output_tokens"),
    (re.compile(r"(messages|prompt)$"), "input"),
    (re.compile(r"truncate_prompt_tokens$"), "truncation"),
    (re.compile(r"reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"verbosity$"), "text.verbosity"),
)


def chat_request(request: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """Return the chat request for a conversation of `items`."""
    fields = request.model_fields_set
    body: dict[str, Any] = {name: getattr(request, name) for name in _SHARED if name in fields}
    body["messages"] = chat_messages(request.instructions, items)
    body["tools"] = chat_tools(request.tools)
    body["tool_choice"] = chat_tool_choice(request.tool_choice)
    body["max_completion_tokens"] = request.max_output_tokens
    if request.truncation == "auto":
        body["truncate_prompt_tokens"] = -1
    if request.shows_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.reasoning is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.text is not None:
        body["verbosity"] = request.text.verbosity
        body["response_format"] = _response_format(request.text.format)
    return parse_chat({name: value for name, value in body.items() if value is not None})


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `text.format` in chat's form."""
    if given is None or given.get("type") != "json_schema":
        return given
    if not isinstance(given.get("name"), str):
        raise BadRequestError("text.format.name must be a string", param="text.format.name")
    described = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}


def field_name(param: str) -> str:
    """Return the field of this route for the field `param` of a chat request."""
    for pattern, name in _NAMES:
        match = pattern.match(param)
        if match is not None:
            return match.expand(name) + param[match.end() :]
    return param


@contextmanager
def own_field_names() -> Iterator[None]:
    """Raise errors about fields of a chat request as errors about the fields of this route."""
    try:
        yield
    except BadRequestError as error:
        if error.param is None:
            raise
        param = field_name(error.param)
        message = error.message.replace(error.param, param)
        if error.param != "max_tokens":
            message = message.replace("max_tokens", "max_output_tokens")
        raise type(error)(message, param=param, code=error.code) from None
