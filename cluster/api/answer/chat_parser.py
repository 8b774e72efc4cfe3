"""Makes chat messages of texts: reasoning, tool calls, content. Knows no format of either."""

import uuid
from collections.abc import Iterator
from typing import Any

from cluster.api.answer.reasoning import ThinkSplitter
from cluster.api.tools.base import CallDelta, CallParser, Piece


class ChatParser:
    """One choice's `MessageParser`. Each part is there only where the request or the model has it.

    max_calls           calls beyond are dropped; None = all are kept
    shows_reasoning     the client wants to see the thoughts
    reports_calls       the finish reason is tool_calls after calls; the API keeps stop where the client named the tool
    """

    def __init__(
        self,
        *,
        thoughts: ThinkSplitter | None = None,
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
        """See MessageParser."""
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
        """See MessageParser. Content is null where there is something else instead of it."""
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
        """See MessageParser."""
        if reason == "stop" and self._made and self._reports_calls:
            return "tool_calls"
        return reason

    def _split(self, text: str, last: bool) -> Iterator[tuple[str, str]]:
        """(reasoning, content) of the text."""
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
