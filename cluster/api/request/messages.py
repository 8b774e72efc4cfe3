"""Checks and normalises chat messages. Knows nothing of templates or tokens."""

import json
from typing import Any

from cluster.errors import BadRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
# Type of a content part -> its field with the text; the last three come from conversations of the Responses API.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Passed to the template as they are when they are strings.
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning")


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Return the `messages` of a request for a chat template: each content is one string."""
    if value is None:
        raise BadRequestError(
            "messages is missing", param="messages", code="missing_required_parameter"
        )
    if not isinstance(value, list) or not value:
        raise BadRequestError("messages must be a list of at least one message", param="messages")
    return [_message(message, f"messages.{i}") for i, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRequestError(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if role not in ROLES:  # also unhashable values: a tuple is searched by equality
        raise BadRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    result: dict[str, Any] = {
        "role": role,
        "content": _content(message.get("content"), role, f"{where}.content"),
    }
    for name in _TEXT_FIELDS:
        text = message.get(name)
        if text is None:
            continue
        if not isinstance(text, str):
            raise BadRequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
        result[name] = text
    if "reasoning" in result:  # the newer name; templates use the older name
        result.setdefault("reasoning_content", result["reasoning"])
    if role == "assistant" and message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return result


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise BadRequestError(f"{where} must be a string or a list of text parts", param=where)
    return "\n".join(_part(part, f"{where}.{i}") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    """Return the text of a content part."""
    if not isinstance(part, dict):
        raise BadRequestError(f"{where} must be an object", param=where)
    kind = part.get("type")
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise BadRequestError(
            f"{where}.type: this model takes text alone, in parts of {', '.join(TEXT_PARTS)}",
            param=f"{where}.type",
            code="unsupported_content_part",
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise BadRequestError(f"{where}.{field} must be a string", param=f"{where}.{field}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return earlier calls of the assistant, with arguments as an object for the template."""
    if not isinstance(calls, list):
        raise BadRequestError(f"{where} must be a list", param=where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequestError(
                f"{where}.{i} must be an object with function.name", param=f"{where}.{i}"
            )
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = function["arguments"]  # left to the template
        named = {"name": function["name"], "arguments": arguments}
        result.append({"id": call.get("id"), "type": "function", "function": named})
    return result
