"""The endpoints that the benchmark can load: their paths, and the events of their streams. Knows nothing of sockets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.bench.stream import Answer, StreamFormat


@dataclass(frozen=True)
class EndpointFormat:
    """One endpoint. start, is_special, file: see StreamFormat."""

    path: str
    start: bytes
    is_special: Callable[[bytes], bool]
    file: Callable[[Answer, dict[str, Any], float], None]

    @property
    def stream(self) -> StreamFormat:
        """The events of its streams."""
        return StreamFormat(self.start, self.is_special, self.file)


def _is_special_chunk(event: bytes) -> bool:
    """Whether a chunk may hold more than output. Quotes in a JSON text are escaped: only keys match."""
    return (
        b'"completion_tokens"' in event
        or b'"finish_reason":"' in event
        or b'"finish_reason": "' in event
        or b'"error"' in event
    )


def _file_chunk(answer: Answer, chunk: dict[str, Any], now: float) -> None:
    if chunk.get("error"):
        answer.error = f"stream: {_error_kind(chunk['error'])}"
    usage = chunk.get("usage")
    if usage:
        answer.prompt_tokens = usage.get("prompt_tokens")
        answer.completion_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens")
        details = usage.get("completion_tokens_details") or {}
        answer.accepted_drafts = details.get("accepted_prediction_tokens")
        answer.rejected_drafts = details.get("rejected_prediction_tokens")
    if any(_has_output(choice) for choice in chunk.get("choices") or ()):
        answer.chunk_times.append(now)


def _has_output(choice: dict[str, Any]) -> bool:
    """Whether a choice has more than a role or a finish reason."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    if any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")):
        return True
    return "role" not in delta and choice.get("finish_reason") is None


def _file_response_event(answer: Answer, event: dict[str, Any], now: float) -> None:
    kind = str(event.get("type"))
    response = event.get("response") or {}
    if kind.endswith(".delta"):
        answer.chunk_times.append(now)
    elif kind in ("error", "response.failed"):
        answer.error = f"stream: {_error_kind(response.get('error') or event | {'type': None})}"
    usage = response.get("usage")
    if usage:
        answer.prompt_tokens = usage.get("input_tokens")
        answer.completion_tokens = usage.get("output_tokens")
        details = usage.get("input_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens")


def _file_message_event(answer: Answer, event: dict[str, Any], now: float) -> None:
    kind = event.get("type")
    if kind == "content_block_delta":
        answer.chunk_times.append(now)
    elif kind == "error":
        answer.error = f"stream: {_error_kind(event.get('error'))}"
    elif kind == "message_delta":
        usage = event.get("usage") or {}
        cached = usage.get("cache_read_input_tokens") or 0
        answer.prompt_tokens = usage.get("input_tokens", 0) + cached
        answer.completion_tokens = usage.get("output_tokens")
        answer.cached_tokens = cached


def _error_kind(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("type") or error.get("code") or error.get("message"))[:80]
    return str(error)[:80]


def _never(_event: bytes) -> bool:
    """The name of an event is enough: an event of that name has output alone."""
    return False


_CHUNK = (b"data: {", _is_special_chunk, _file_chunk)
FORMATS = {
    "completions": EndpointFormat("/v1/completions", *_CHUNK),
    "chat": EndpointFormat("/v1/chat/completions", *_CHUNK),
    "responses": EndpointFormat(
        "/v1/responses", b"event: response.output_text.delta\n", _never, _file_response_event
    ),
    "messages": EndpointFormat(
        "/v1/messages", b"event: content_block_delta\n", _never, _file_message_event
    ),
}
