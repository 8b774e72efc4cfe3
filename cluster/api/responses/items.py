"""Checks the `input` of a request and normalises it to items. Knows nothing of chat messages or of the store.

An item is a JSON object as a client would get it back, except for its id. Contents of messages and of outputs are
lists of parts, texts or images.
"""

import uuid
from collections.abc import Callable
from typing import Any

from cluster.api.request.messages import REFUSED
from cluster.api.request.protocol import check_text
from cluster.errors import BadRequestError, UnsupportedParameterError

Item = dict[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text")
_ID_LENGTH = 256
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def parse_input(value: Any, find: Callable[[str, str], Item]) -> list[Item]:
    """Return the items of `input`, without ids where the client gave none.

    find    returns the kept item that an `item_reference` names: its id, and the field for errors
    """
    if value is None:
        raise BadRequestError("input is missing", param="input", code="missing_required_parameter")
    if isinstance(value, str):
        check_text(value, "input")
        return [_message("user", [{"type": "input_text", "text": value}])]
    if not isinstance(value, list) or not value:
        raise BadRequestError(
            "input must be a string or a list of at least one item", param="input"
        )
    return [_item(item, f"input.{i}", find) for i, item in enumerate(value)]


def with_ids(items: list[Item]) -> list[Item]:
    """Return the items, each with an id, as its first field."""
    return [{"id": new_id(_PREFIXES[item["type"]]), **item} for item in items]


def new_id(prefix: str) -> str:
    """Return an id of the form of OpenAI's, such as msg_0123456789abcdef."""
    return f"{prefix}_{uuid.uuid4().hex}"


def _message(role: str, content: list[dict[str, Any]]) -> Item:
    return {"type": "message", "role": role, "content": content, "status": "completed"}


def _item(value: Any, where: str, find: Callable[[str, str], Item]) -> Item:
    if not isinstance(value, dict):
        raise BadRequestError(f"{where} must be an object with a type", param=where)
    kind = value.get("type")
    if kind is None and "role" in value:
        kind = "message"
    if not isinstance(kind, str):
        raise BadRequestError(f"{where}.type must be a string", param=f"{where}.type")
    if kind == "item_reference":
        return find(_text(value, "id", where), f"{where}.id")
    parse = _PARSERS.get(kind)
    if parse is None:
        raise UnsupportedParameterError(
            f"{where}.type: items of type {kind[:60]!r} are not supported; "
            f"this server takes {', '.join(_PARSERS)}, item_reference",
            param=f"{where}.type",
        )
    item = parse(value, where)
    if value.get("id") is not None:
        item["id"] = _text(value, "id", where)[:_ID_LENGTH]
    return item


def _parse_message(value: dict[str, Any], where: str) -> Item:
    role = value.get("role")
    if role not in _ROLES:
        raise BadRequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    kind = "output_text" if role == "assistant" else "input_text"
    content = _parts(value.get("content"), f"{where}.content", kind, images=role == "user")
    return _message(role, content)


def _parse_call(value: dict[str, Any], where: str) -> Item:
    return {
        "type": "function_call",
        "call_id": _text(value, "call_id", where),
        "name": _text(value, "name", where),
        "arguments": _text(value, "arguments", where),
        "status": "completed",
    }


def _parse_output(value: dict[str, Any], where: str) -> Item:
    return {
        "type": "function_call_output",
        "call_id": _text(value, "call_id", where),
        "output": _parts(value.get("output"), f"{where}.output", "input_text", images=True),
        "status": "completed",
    }


def _parse_reasoning(value: dict[str, Any], where: str) -> Item:
    """Return the reasoning; `encrypted_content` is of another server and is dropped."""
    return {
        "type": "reasoning",
        "summary": _texts(value, "summary", "summary_text", where),
        "content": _texts(value, "content", "reasoning_text", where),
        "status": "completed",
    }


_PARSERS = {
    "message": _parse_message,
    "function_call": _parse_call,
    "function_call_output": _parse_output,
    "reasoning": _parse_reasoning,
}


def _parts(content: Any, where: str, kind: str, *, images: bool) -> list[dict[str, Any]]:
    """Return text parts of type `kind`, and image parts where they may be."""
    if isinstance(content, str):
        check_text(content, where)
        return [_part(content, kind)]
    if not isinstance(content, list):
        raise BadRequestError(f"{where} must be a string or a list of text parts", param=where)
    return [
        _image(part, f"{where}.{i}")
        if images and isinstance(part, dict) and part.get("type") == "input_image"
        else _part(_part_text(part, f"{where}.{i}"), kind)
        for i, part in enumerate(content)
    ]


def _image(part: dict[str, Any], where: str) -> dict[str, Any]:
    if part.get("image_url") is None and part.get("file_id") is not None:
        raise UnsupportedParameterError(
            f"{where}.file_id is not supported; send image_url", param=f"{where}.file_id"
        )
    url, detail = _text(part, "image_url", where), part.get("detail")
    return {
        "type": "input_image",
        "image_url": url,
        "detail": detail if isinstance(detail, str) else "auto",
    }


def _part(text: str, kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    if kind == "output_text":
        part |= {"annotations": [], "logprobs": []}
    return part


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise BadRequestError(f"{where} must be an object with type and text", param=where)
    kind = part.get("type")
    if kind == "refusal":
        return _text(part, "refusal", where)
    if kind not in _TEXT_PARTS:
        what = f", got {kind[:60]!r}" if isinstance(kind, str) else ""
        known = f"must be {' or '.join(_TEXT_PARTS)}{what}; users and outputs may have input_image"
        reason = REFUSED.get(kind) if isinstance(kind, str) else None
        raise BadRequestError(
            f"{where}.type {kind!r}: {reason}" if reason else f"{where}.type {known}",
            param=f"{where}.type",
            code="unsupported_content_part",
        )
    return _text(part, "text", where)


def _texts(value: dict[str, Any], name: str, kind: str, where: str) -> list[dict[str, Any]]:
    """Return the parts of a reasoning item's `content` or `summary`."""
    parts = value.get(name)
    where += f".{name}"
    if parts is None:
        return []
    if not isinstance(parts, list):
        raise BadRequestError(f"{where} must be a list of {kind} parts", param=where)
    result = []
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != kind:
            raise BadRequestError(
                f'{where}.{i} must be {{"type": "{kind}", "text": ...}}', param=f"{where}.{i}"
            )
        result.append({"type": kind, "text": _text(part, "text", f"{where}.{i}")})
    return result


def _text(value: dict[str, Any], name: str, where: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise BadRequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    check_text(text, f"{where}.{name}")
    return text
