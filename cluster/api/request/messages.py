"""Checks and normalises chat messages. Knows nothing of templates, tokens, or the content of images and videos."""

import json
from typing import Any

from cluster.api.images.medium import MediaKind, Medium
from cluster.api.request.cut_json import completed
from cluster.errors import BadRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
# Type of a content part -> its field with the text; the last three come from conversations of the Responses API.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
IMAGE_PARTS = ("image_url", "input_image")
VIDEO_PARTS = ("video_url",)
_MEDIA_ROLES = ("user", "tool")
REFUSED = {
    "input_audio": "audio is not served, because no model here has an encoder for it",
    "audio_url": "audio is not served, because no model here has an encoder for it",
    "file": "files are not served; send their text, or images of their pages",
    "input_file": "files are not served; send their text, or images of their pages",
}
"""Type of a content part -> why it is refused."""
# Passed to the template as they are when they are strings.
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning")


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Return the `messages` of a request.

    Each content is one string, or with images and videos a list of {type: text, text} and {type: image or video, url}.
    """
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


def take_media(messages: list[dict[str, Any]]) -> list[Medium]:
    """Return all images and videos in order, and leave the type of each, which chat templates read."""
    found: list[Medium] = []
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if (kind := part["type"]) != "text":
                number = sum(medium.kind == kind for medium in found)
                found.append(Medium(kind, number, part.pop("url")))
    return found


def _content(content: Any, role: str, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise BadRequestError(f"{where} must be a string or a list of text parts", param=where)
    parts = [_part(part, role, f"{where}.{i}") for i, part in enumerate(content)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: Any, role: str, where: str) -> dict[str, str]:
    """Return a content part as text, image or video."""
    if not isinstance(part, dict):
        raise BadRequestError(f"{where} must be an object", param=where)
    kind = part.get("type")
    if kind in IMAGE_PARTS:
        return {"type": "image", "url": _url(part, "image", role, where)}
    if kind in VIDEO_PARTS:
        return {"type": "video", "url": _url(part, "video", role, where)}
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        known = f"parts may be {', '.join((*TEXT_PARTS, *IMAGE_PARTS, *VIDEO_PARTS))}"
        raise BadRequestError(
            f"{where}.type: {REFUSED.get(kind, known) if isinstance(kind, str) else known}",
            param=f"{where}.type",
            code="unsupported_content_part",
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise BadRequestError(f"{where}.{field} must be a string", param=f"{where}.{field}")
    return {"type": "text", "text": text}


def _url(part: dict[str, Any], kind: MediaKind, role: str, where: str) -> str:
    if role not in _MEDIA_ROLES:
        raise BadRequestError(
            f"{where}: messages of the roles {' and '.join(_MEDIA_ROLES)} may have {kind}s",
            param=where,
            code="unsupported_content_part",
        )
    name = f"{kind}_url"
    value = part.get(name)
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise BadRequestError(
            f"{where}.{name} must be {{url: string}} or a string; {kind}s of file ids are not served",
            param=f"{where}.{name}",
        )
    return url


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
                arguments = json.loads(arguments) or {}  # some clients write null for none
            except (ValueError, RecursionError):
                value = completed(function["arguments"])
                if value is not None:  # all else is left to the template
                    arguments = value
        named = {"name": function["name"], "arguments": arguments}
        result.append({"id": call.get("id"), "type": "function", "function": named})
    return result
