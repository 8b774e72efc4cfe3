"""Splits the text of a choice into reasoning, tool calls and content. Knows nothing of call formats and of routes."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.api.answer.reasoning import Splitter
from cluster.api.tools.base import CallDelta, CallParser, Piece, Thought


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the reasoning."""

    text: str


@dataclass(slots=True)
class ToolCall:
    """Call number `index` of a message, so far; the arguments are JSON text in parts."""

    index: int
    name: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The JSON text so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class CallPart:
    """The beginning of `call` if `arguments` is empty, else the next part of its arguments."""

    call: ToolCall
    arguments: str


MessagePart = str | Reasoning | CallPart
"""The next part of a message: content, reasoning, or a tool call."""


class MessageParser:
    """Parses the text of one choice as it arrives. A choice without a parser shows all text as content.

    thoughts            splits reasoning from the rest; None = the model does not think
    calls               finds tool calls, and with channels reasoning; None = the request has no tools
    has_channels        `calls` finds reasoning
    max_calls           further calls are dropped; None = no limit
    shows_reasoning     the message has the reasoning
    reports_calls       the finish reason after calls is tool_calls; it stays `stop` where the client named the tool
    """

    def __init__(
        self,
        *,
        thoughts: Splitter | None = None,
        calls: CallParser | None = None,
        max_calls: int | None = None,
        shows_reasoning: bool = True,
        reports_calls: bool = True,
        has_channels: bool = False,
    ) -> None:
        self._thoughts = thoughts
        self._call_parser = calls
        self._max_calls = max_calls
        self._shows_reasoning = shows_reasoning
        self._reports_calls = reports_calls
        self._has_channels = has_channels
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.calls: list[ToolCall] = []

    def push(self, text: str, *, last: bool) -> list[MessagePart]:
        """Return the parts that `text` completes, perhaps none; `last`: nothing is held back any more."""
        parts: list[MessagePart] = []
        for reasoning, content in self._split(text, last):
            parts += self._thought(reasoning)
            if content:
                pieces: list[Piece] = (
                    [content] if self._call_parser is None else self._call_parser.push(content)
                )
                parts += self._parts(pieces)
        if last and self._call_parser is not None:
            parts += self._parts(self._call_parser.flush())
        return parts

    @property
    def thinks(self) -> bool:
        """Whether the model thinks, so that a message has a field for reasoning."""
        return self._thoughts is not None or self._has_channels

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """The content so far."""
        return "".join(self._content)

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason of the answer, after the last `push`; `reason` is that of the text."""
        if reason == "stop" and self.calls and self._reports_calls:
            return "tool_calls"
        return reason

    def _split(self, text: str, last: bool) -> Iterator[tuple[str, str]]:
        """Yield (reasoning, content) of the text."""
        if self._thoughts is None:
            yield "", text
            return
        yield self._thoughts.push(text)
        if last:
            yield self._thoughts.flush()

    def _parts(self, pieces: list[Piece]) -> Iterator[MessagePart]:
        for piece in pieces:
            if isinstance(piece, Thought):
                yield from self._thought(piece.text)
            elif isinstance(piece, str):
                self._content.append(piece)
                yield piece
            elif self._max_calls is None or piece.index < self._max_calls:
                yield self._call_part(piece)

    def _thought(self, text: str) -> list[MessagePart]:
        """Return a part of the reasoning if there is one to show."""
        if not text or not self._shows_reasoning:
            return []
        self._reasoning.append(text)
        return [Reasoning(text)]

    def _call_part(self, piece: CallDelta) -> CallPart:
        if piece.name is not None:
            call = ToolCall(piece.index, piece.name)
            call.call_id = piece.call_id or call.call_id
            self.calls.append(call)
            return CallPart(self.calls[-1], "")
        call = self.calls[piece.index]
        call.parts.append(piece.arguments)
        return CallPart(call, piece.arguments)
