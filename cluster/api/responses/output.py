"""The output items of a response while its text arrives. Knows nothing of events, of requests and of the store."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cluster.api.answer.generation import Choice
from cluster.api.answer.message_parser import MessagePart, Reasoning, ToolCall
from cluster.api.responses.items import new_id


class OutputItem(ABC):
    """Item number `index` of a response, so far."""

    prefix: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.index = index
        self.item_id = new_id(self.prefix)
        self.status = "in_progress"
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far; of a call, its arguments."""
        return "".join(self.texts)

    @abstractmethod
    def to_json(self, *, opening: bool = False) -> dict[str, Any]:
        """Return the item as clients see it; `opening`: as it was before its first text."""


class MessageItem(OutputItem):
    """A message of the assistant. logprobs: of its tokens, if the client wants them."""

    prefix = "msg"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.logprobs: list[dict[str, Any]] = []

    def part(self, *, opening: bool = False) -> dict[str, Any]:
        """Return the content part; see to_json."""
        text, logprobs = ("", []) if opening else (self.text, self.logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def to_json(self, *, opening: bool = False) -> dict[str, Any]:
        """See OutputItem."""
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if opening else self.status,
            "content": [] if opening else [self.part()],
        }


class ReasoningItem(OutputItem):
    """The reasoning of the model; its own words, so there is no summary."""

    prefix = "rs"

    def part(self, *, opening: bool = False) -> dict[str, Any]:
        """Return the content part; see to_json."""
        return {"type": "reasoning_text", "text": "" if opening else self.text}

    def to_json(self, *, opening: bool = False) -> dict[str, Any]:
        """See OutputItem."""
        return {
            "id": self.item_id,
            "type": "reasoning",
            "status": "in_progress" if opening else self.status,
            "summary": [],
            "content": [] if opening else [self.part()],
            "encrypted_content": None,
        }


class CallItem(OutputItem):
    """A call of a function."""

    prefix = "fc"

    def __init__(self, index: int, call: ToolCall) -> None:
        super().__init__(index)
        self._call = call

    def to_json(self, *, opening: bool = False) -> dict[str, Any]:
        """See OutputItem."""
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": "in_progress" if opening else self.status,
            "call_id": self._call.call_id,
            "name": self._call.name,
            "arguments": "" if opening else self.text,
        }


@dataclass(slots=True)
class Change:
    """A change of one item: `closed`, opened by its first text, or more text."""

    item: OutputItem
    opened: bool = False
    closed: bool = False
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Output:
    """The items of one response, from the steps of its only choice."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._logprobs: list[dict[str, Any]] = []  # of tokens with text that a parser holds back
        self._num_placed = 0  # tokens with log-probabilities before those

    def push(self, choice: Choice, text: str) -> list[Change]:
        """Take the text of the next output, or the whole text."""
        last = choice.text.finish_reason is not None
        parts: list[MessagePart] = (
            [text] if choice.parser is None else choice.parser.push(text, last=last)
        )
        if choice.report is not None:
            self._take_logprobs(choice)
        changes: list[Change] = []
        for part in parts:
            if part:
                changes += self._add(part)
        item = self.items[-1] if self.items else None
        if last and self._logprobs and isinstance(item, MessageItem):  # those of the end token
            changes.append(self._with_logprobs(Change(item)))
        return changes

    def finish(self, *, complete: bool) -> list[Change]:
        """Close the last item. A response has an item even without any text."""
        changes = [] if self.items else self._opened(MessageItem(0))
        item = self.items[-1]
        item.status = "completed" if complete else "incomplete"
        return [*changes, Change(item, closed=True)]

    def to_json(self) -> list[dict[str, Any]]:
        """Return all items."""
        return [item.to_json() for item in self.items]

    def _add(self, part: MessagePart) -> list[Change]:
        item = self.items[-1] if self.items else None
        if isinstance(part, str):
            changes = []
            if not isinstance(item, MessageItem):
                item = MessageItem(len(self.items))
                changes = self._opened(item)
            item.texts.append(part)
            return [*changes, self._with_logprobs(Change(item, text=part))]
        changes = []
        if isinstance(part, Reasoning):
            if not isinstance(item, ReasoningItem):
                item = ReasoningItem(len(self.items))
                changes = self._opened(item)
            text = part.text
        else:
            self._place(len(self._logprobs))  # those of the call
            text = part.arguments
            if not text:
                return self._opened(CallItem(len(self.items), part.call))
            assert isinstance(item, CallItem), "arguments follow the beginning of their call"
        item.texts.append(text)
        return [*changes, Change(item, text=text)]

    def _opened(self, item: OutputItem) -> list[Change]:
        changes = []
        if self.items:
            self.items[-1].status = "completed"
            changes = [Change(self.items[-1], closed=True)]
        self.items.append(item)
        return [*changes, Change(item, opened=True)]

    def _take_logprobs(self, choice: Choice) -> None:
        """Take the log-probabilities of the last step, without those of the thought."""
        assert choice.report is not None
        self._logprobs += (choice.report.take()["logprobs"] or {"content": []})["content"]
        in_call = bool(self.items) and isinstance(self.items[-1], CallItem)
        num_thought = max(choice.num_reasoning_tokens - self._num_placed, 0)
        self._place(len(self._logprobs) if in_call else num_thought)

    def _place(self, num: int) -> list[dict[str, Any]]:
        """Remove and return the first `num` log-probabilities."""
        placed, self._logprobs = self._logprobs[:num], self._logprobs[num:]
        self._num_placed += len(placed)
        return placed

    def _with_logprobs(self, change: Change) -> Change:
        """Give the change the log-probabilities of the tokens of its text, or all if it has none."""
        found = self._logprobs
        if found:
            num = _num_covering(found, change.text) if change.text else len(found)
            change.logprobs = self._place(num)
            assert isinstance(change.item, MessageItem), "only messages have log-probabilities"
            change.item.logprobs += change.logprobs
        return change


def _num_covering(logprobs: list[dict[str, Any]], text: str) -> int:
    """Return the number of tokens that make the text, because tokens of a call may follow in the same step.

    White space at the ends does not count, because parsers drop it next to tags.
    """
    missing = len(text.strip().encode(errors="replace"))
    began = False
    for i, token in enumerate(logprobs, start=1):
        value = bytes(token["bytes"])
        value = value if began else value.lstrip()
        began = began or bool(value)
        missing -= len(value)
        if began and missing <= 0:
            return i
    return len(logprobs)
