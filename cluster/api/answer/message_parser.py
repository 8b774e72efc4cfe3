"""Splits the text of a choice into reasoning, tool calls and content. Knows nothing of call formats."""

import uuid
from collections.abc import Iterator
from typing import Any

from cluster.api.answer.reasoning import ReasoningSplitter
from cluster.api.tools.base import CallDelta, CallParser, Piece


class MessageParser:
    """Parses the text of one choice as it arrives. A choice without a parser shows all text as content.

    thoughts            splits reasoning from the rest; None = the model does not think
    calls               finds tool calls; None = the request has no tools
    max_calls           further calls are dropped; None = no limit
    shows_reasoning     the message has the reasoning
    reports_calls       the finish reason after calls is tool_calls; it stays `stop` where the client named the tool
    """

    def __init__(
        self,
        *,
        thoughts: ReasoningSplitter | None = None,
        calls: CallParser | None = None,
        max_calls: int | None = None,
        shows_reasoning: bool = True,
        reports_calls: bool = True,
    ) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self._max_calls = max_calls
        self._shows_reasoning = shows_reasoning
        self._reports_calls = reports_calls
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._made: list[dict[str, Any]] = []  # calls as in a message; arguments as a list of texts

    def push(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """Return the deltas that `text` completes, perhaps none; `last`: nothing is held back any more."""
        deltas: list[dict[str, Any]] = []
        for reasoning, content in self._split(text, last):
            if reasoning and self._shows_reasoning:
                self._reasoning.append(reasoning)
                deltas.append({"reasoning_content": reasoning, "reasoning": reasoning})
            if content:
                pieces: list[Piece] = (
                    [content] if self._calls is None else self._calls.push(content)
                )
                deltas += self._deltas(pieces)
        if last and self._calls is not None:
            deltas += self._deltas(self._calls.flush())
        return deltas

    def message(self) -> dict[str, Any]:
        """Return the fields of the message, after the last `push`. Content is null beside reasoning or calls alone."""
        reasoning = "".join(self._reasoning) or None
        content = "".join(self._content)
        message: dict[str, Any] = {"content": content}
        if self._thoughts is not None:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self._made:
            message["tool_calls"] = [_whole_call(call) for call in self._made]
        if not content and (self._made or reasoning):
            message["content"] = None
        return message

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason of the answer, after the last `push`; `reason` is that of the text."""
        if reason == "stop" and self._made and self._reports_calls:
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

    def _deltas(self, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            if isinstance(piece, str):
                self._content.append(piece)
                yield {"content": piece}
            elif self._max_calls is None or piece.index < self._max_calls:
                yield {"tool_calls": [self._call_delta(piece)]}

    def _call_delta(self, piece: CallDelta) -> dict[str, Any]:
        if piece.name is None:
            self._made[piece.index]["arguments"].append(piece.arguments)
            return {"index": piece.index, "function": {"arguments": piece.arguments}}
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "name": piece.name, "arguments": []}
        self._made.append(call)
        function = {"name": piece.name, "arguments": ""}
        return {"index": piece.index, "id": call["id"], "type": "function", "function": function}


def _whole_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": "".join(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}
