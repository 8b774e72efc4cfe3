"""Reads `prediction` of a chat request: text that the answer may repeat. Knows nothing of tokens or drafts."""

from typing import Any

from cluster.api.request.protocol import check_text
from cluster.errors import BadRequestError


def predicted_text(value: Any) -> str:
    """Return the text of {type: content, content: text or text parts}; "" for null. Raises BadRequestError."""
    if value is None:
        return ""
    if not isinstance(value, dict) or value.get("type") != "content":
        raise _error("prediction", "an object with type content")
    content = value.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return "".join(map(_text_of, parts))


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise _error("prediction.content", "a string or a list of {type: text, text}")
    check_text(text, "prediction.content")
    return text


def _error(param: str, expected: str) -> BadRequestError:
    return BadRequestError(f"{param} must be {expected}", param=param)
