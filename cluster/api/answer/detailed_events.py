"""Stream items of (chat) completions with more than text: logprobs, token ids, usage so far, parsed messages.

Extends `events.EventWriter` for requests with such fields. It is slower, because each item is built as a whole.
Knows nothing of sockets or engines.
"""

from typing import Any

from cluster.api.answer.events import EventWriter, head_of, to_json, usage
from cluster.api.answer.generation import Choice, Generation
from cluster.api.answer.message_parser import MessagePart, Reasoning


def make_writer(generation: Generation) -> EventWriter:
    """Return the writer of a completion or a chat completion."""
    return (DetailedEventWriter if generation.has_details else EventWriter)(generation)


class DetailedEventWriter(EventWriter):
    """The `AnswerWriter` of (chat) completions with more than text in their stream items."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._head = head_of(generation, self._kind)
        self._opened: set[int] = set()

    def begin(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter: the role of a chat choice with the fields of the prompt, and the first text."""
        body = self.text(choice, text)
        if not self._generation.is_chat:
            return body
        delta = {"role": "assistant", "content": ""}
        fields = {"delta": delta, "logprobs": None, "finish_reason": None}
        about_prompt = choice.report.prompt() if choice.report is not None else {}
        return self._event(choice, fields, about_prompt) + body

    def text(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter: the items of one step's text, with the finish reason if the choice has ended.

        Returns b"" while the parser holds the text back, unless there are logprobs or token ids to show.
        """
        last = choice.text.finish_reason is not None
        if not self._generation.is_chat:
            contents: list[dict[str, Any]] = [{"text": text}]
        elif choice.parser is None:
            contents = [{"delta": {"content": text}}]
        else:
            contents = [{"delta": _delta(part)} for part in choice.parser.push(text, last=last)]
            if not contents and (
                last or choice.report is not None or self._generation.continuous_usage
            ):
                contents = [{"delta": {}}]
        if not contents:
            return b""
        plain = {"logprobs": None, "finish_reason": None}
        items = [self._event(choice, content | plain, {}) for content in contents[:-1]]
        fields = contents[-1] | self._details(choice) | {"finish_reason": choice.finish_reason}
        if last:
            fields["stop_reason"] = choice.text.stop_reason
        return b"".join([*items, self._event(choice, fields, {})])

    def _details(self, choice: Choice) -> dict[str, Any]:
        """Return the logprobs and ids since the last item; the first item of a completion includes the prompt's."""
        if choice.report is None:
            return {"logprobs": None}
        fields = choice.report.take()
        if not self._generation.is_chat and choice.index not in self._opened:
            self._opened.add(choice.index)
            fields |= choice.report.prompt()
        return fields

    def _event(self, choice: Choice, fields: dict[str, Any], beside: dict[str, Any]) -> bytes:
        item = self._head | {"choices": [{"index": choice.index, **fields}]} | beside
        if self._generation.continuous_usage:
            item["usage"] = usage(
                len(choice.prompt_token_ids),
                choice.text.num_tokens,
                choice.num_cached_tokens,
                choice.num_reasoning_tokens,
                choice.drafts,
            )
        elif self._generation.include_usage:
            item["usage"] = None
        return b"data: " + to_json(item) + b"\n\n"


def _delta(part: MessagePart) -> dict[str, Any]:
    """Return the delta of a chat stream item."""
    if isinstance(part, str):
        return {"content": part}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text, "reasoning": part.text}
    call = part.call
    function = {"arguments": part.arguments}
    if part.arguments:
        return {"tool_calls": [{"index": call.index, "function": function}]}
    function = {"name": call.name} | function
    opened = {"index": call.index, "id": call.call_id, "type": "function", "function": function}
    return {"tool_calls": [opened]}
