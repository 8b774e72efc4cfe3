"""Reads and times one streamed answer with little work for a chunk.

Only chunks up to the first output and chunks with usage or an error are parsed as JSON; of all other chunks only
the time is kept. Tokens are counted by the server's usage, because a chunk may hold no token or many.
Knows nothing of sockets and of the fields of events.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

EVENT_END = b"\n\n"
SHOWN_CHARS = 300


def shown(body: bytes) -> str:
    """Return the beginning of a body for a message."""
    return body.decode(errors="replace").strip()[:SHOWN_CHARS]


@dataclass
class Answer:
    """The answer to one request. Times are perf_counter seconds; chunk_times has the chunks with output.

    started: when the request was due, from where latency counts. sent: when it was sent; later
    than `started` where the client fell behind its schedule or waited for a free place.
    ended: 0 while it runs. refusal: beginning of the body of an answer with another status than 200.
    """

    started: float
    ended: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    accepted_drafts: int | None = None
    rejected_drafts: int | None = None
    error: str | None = None
    sent: float = 0.0
    refusal: str = ""

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


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The events of one endpoint.

    start       events with output begin so; they are not parsed once there was output
    is_special  whether an event that begins with `start` may hold more than output
    file        records a parsed event in the answer
    """

    start: bytes
    is_special: Callable[[bytes], bool]
    file: Callable[[Answer, dict[str, Any], float], None]


class EventReader:
    """Splits server-sent events and records them in an Answer. `feed` is a BodySink."""

    def __init__(self, answer: Answer, form: StreamFormat):
        self._answer = answer
        self._start, self._is_special, self._file = form.start, form.is_special, form.file
        self._tail = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take the bytes of one read at time `now`."""
        times = self._answer.chunk_times
        # Nearly every read is one whole event with output, which needs no split and no JSON.
        if (
            times
            and not self._tail
            and data.find(EVENT_END) == len(data) - 2
            and data.startswith(self._start)
            and not self._is_special(data)
        ):
            times.append(now)
            return
        if self._tail:
            data = self._tail + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._tail = data.split(EVENT_END)
        for event in events:
            if times and event.startswith(self._start) and not self._is_special(event):
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
            self._file(self._answer, chunk, now)
