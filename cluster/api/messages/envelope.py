"""The error envelope of Anthropic's API, and the names of its fields in messages. Knows nothing of HTTP."""

import re
from typing import Any

from cluster.errors import ContextLengthError, ServingError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Fields of the chat request to which a messages request is translated, and the fields that they come from.
_FIELDS = [
    (re.compile(r"\btools\.(\d+)\.function\.parameters\b"), r"tools.\1.input_schema"),
    (re.compile(r"\btools\.(\d+)\.function\b"), r"tools.\1"),
    (re.compile(r"\btool_choice\.function\.name\b"), "tool_choice.name"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "output_config.format"),
    (re.compile(r"\bresponse_format\b"), "output_config.format"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"\breasoning_effort\b"), "output_config.effort"),
    (re.compile(r"\bchat_template_kwargs\b"), "thinking"),
]
# The tool runner of Anthropic's SDK requests a stored conversation by default. With these details it sends the whole
# conversation in every request instead.
_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


def error_object(error: ServingError, request_id: str, status: int | None = None) -> dict[str, Any]:
    """Return the envelope of an error; `status` replaces the status of the error."""
    status = status or error.status
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    inner: dict[str, Any] = {"type": kind, "message": _message(error)}
    if (details := _DETAILS.get(error.param or "")) is not None:
        inner["details"] = details
    return {"type": "error", "error": inner, "request_id": request_id}


def _message(error: ServingError) -> str:
    """Return the message with the name of the field, because the envelope has no other place for it."""
    message, param = error.message, error.param or ""
    for chat_name, name in _FIELDS:
        message, param = chat_name.sub(name, message), chat_name.sub(name, param)
    if isinstance(error, ContextLengthError):
        # Claude Code searches for these words and numbers, and then shortens the conversation.
        return f"prompt is too long: {error.num_tokens} tokens > {error.limit} maximum; {message}"
    return message if param in message else f"{param}: {message}"
