"""Reads and times one streamed OpenAI answer with little work for a chunk.

Only chunks up to the first output and chunks with usage or an error are parsed as JSON; of all other chunks only
the time is kept. Tokens are counted by the server's usage, because a chunk may hold no token or many.
Knows nothing of sockets.
"""

import json
from dataclasses import dataclass, field
from typing import Any

EVENT_END = b"\n\n"
EVENT_START = b"data: {"


@dataclass
class Answer:
    """The answer to one request. Times are perf_counter seconds; chunk_times has the chunks with output.

    started: when the request was due, from where latency counts. sent: when it was sent; later
    than `started` where the client fell behind its schedule or waited for a free place.
    ended: 0 while it runs.
    """

    started: float
    ended: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    sent: float = 0.0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first output; None where there was none."""
        return self.chunk_times[0] - self.started if self.chunk_times else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None without usage, or with one token."""
        if self.completion_tokens is None or self.completion_tokens < 2 or not self.chunk_times:
            return None
        return (self.ended - self.chunk_times[0]) / (self.completion_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds to the last byte."""
        return self.ended - self.started


class EventReader:
    """Splits server-sent events and records them in an Answer. `feed` is a BodySink."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._tail = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take the bytes of one read at time `now`."""
        times = self._answer.chunk_times
        # Nearly every read is one whole event with output, which needs no split and no JSON.
        if (
            times
            and not self._tail
            and data.find(EVENT_END) == len(data) - 2
            and data.startswith(EVENT_START)
            and not _is_special(data)
        ):
            times.append(now)
            return
        if self._tail:
            data = self._tail + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._tail = data.split(EVENT_END)
        for event in events:
            if times and event.startswith(EVENT_START) and not _is_special(event):
                times.append(now)
            else:
                self._parse(event, now)

    def _parse(self, event: bytes, now: float) -> None:
        for line in event.split(b"\n"):
            payload = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or payload == b"[DONE]":
                continue
            try:
                chunk = json.loads(payload)
            except ValueError:
                self._answer.error = "malformed event"
                return
            self._file(chunk, now)

    def _file(self, chunk: dict[str, Any], now: float) -> None:
        if chunk.get("error"):
            self._answer.error = f"stream: {_error_kind(chunk['error'])}"
        usage = chunk.get("usage")
        if usage:
            self._answer.prompt_tokens = usage.get("prompt_tokens")
            self._answer.completion_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details") or {}
            self._answer.cached_tokens = details.get("cached_tokens")
        if any(_has_output(choice) for choice in chunk.get("choices") or ()):
            self._answer.chunk_times.append(now)


def _is_special(event: bytes) -> bool:
    """Whether a chunk may hold more than output. Quotes in a JSON text are escaped: only keys match."""
    return (
        b'"completion_tokens"' in event
        or b'"finish_reason":"' in event
        or b'"finish_reason": "' in event
        or b'"error"' in event
    )


def _has_output(choice: dict[str, Any]) -> bool:
    """Whether a choice has more than a role or a finish reason."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    if any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")):
        return True
    return "role" not in delta and choice.get("finish_reason") is None


def _error_kind(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("type") or error.get("code") or error.get("message"))[:80]
    return str(error)[:80]
