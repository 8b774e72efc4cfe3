"""Stream items that carry more than text: logprobs, token ids, usage so far, parsed messages.

Replaces `events.EventWriter` for requests with such fields. It is slower, because each item is built as a whole.
Knows nothing of sockets or engines.
"""

from typing import Any

from cluster.api.answer.events import head_of, to_json, usage, usage_of
from cluster.api.answer.generation import Choice, Generation


class DetailedEventWriter:
    """Builds the stream items of one generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._head = head_of(
            generation, "chat.completion.chunk" if generation.is_chat else "text_completion"
        )
        self._opened: set[int] = set()

    def role(self, choice: Choice) -> bytes:
        """Return the first item of a chat choice, with the fields of the prompt."""
        delta = {"role": "assistant", "content": ""}
        fields = {"delta": delta, "logprobs": None, "finish_reason": None}
        about_prompt = choice.report.prompt() if choice.report is not None else {}
        return self._event(choice, fields, about_prompt)

    def text(self, choice: Choice, text: str) -> bytes:
        """Return the items of one step's text, with the finish reason if the choice has ended.

        Returns b"" while the parser holds the text back, unless there are logprobs or token ids to show.
        """
        last = choice.text.finish_reason is not None
        if not self._generation.is_chat:
            contents: list[dict[str, Any]] = [{"text": text}]
        elif choice.parser is None:
            contents = [{"delta": {"content": text}}]
        else:
            deltas = choice.parser.push(text, last=last)
            contents = [{"delta": delta} for delta in deltas]
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

    def usage(self) -> bytes:
        """Return the usage item, which follows all choices."""
        return _event(self._head | {"choices": [], "usage": usage_of(self._generation)})

    def _event(self, choice: Choice, fields: dict[str, Any], beside: dict[str, Any]) -> bytes:
        item = self._head | {"choices": [{"index": choice.index, **fields}]} | beside
        if self._generation.continuous_usage:
            item["usage"] = usage(
                len(choice.prompt_token_ids), choice.text.num_tokens, choice.num_cached_tokens
            )
        elif self._generation.include_usage:
            item["usage"] = None
        return _event(item)


def _event(item: dict[str, Any]) -> bytes:
    return b"data: " + to_json(item) + b"\n\n"
