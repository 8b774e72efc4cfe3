"""Parses calls of Granite 3: a marker, then a JSON list of {"name": ..., "arguments": {...}}."""

from collections.abc import Callable, Sequence

from cluster.api.tools.base import CallFormat, Piece, Tool
from cluster.api.tools.json_calls import JsonParser, call_rules

OPEN = "<|tool_call|>"
MARKS = (OPEN, "<tool_call>")  # Granite 3.1 also writes the second


class GraniteParser(JsonParser):
    """Calls begin the answer. The marker may be missing, where it is a special token that is not shown."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._begin = ""  # up to the first character that decides whether there is a marker
        self._mark: str | None = None  # the marker, empty if there is none; None: not decided yet

    def push(self, text: str) -> list[Piece]:
        """See CallParser."""
        if self._mark is None:
            self._begin += text
            begun = self._begin.lstrip()
            found = next((mark for mark in MARKS if begun.startswith(mark)), "")
            if not found and any(mark.startswith(begun) for mark in MARKS):
                return []
            cut = len(self._begin) - len(begun) + len(found) if found else 0
            self._mark, text = self._begin[:cut], self._begin[cut:]
            self._begin = ""
        return super().push(text)

    def flush(self) -> list[Piece]:
        """See CallParser."""
        rest: list[Piece] = [self._begin] if self._begin else super().flush()
        mark = "" if self._num_calls or self._scanner.started or self._is_content else self._mark
        self._begin, self._mark = "", ""
        return [mark, *rest] if mark else rest

    def _give_up(self, pieces: list[Piece]) -> None:
        if not self._num_calls:
            self._raw = (self._mark or "") + self._raw
        super()._give_up(pieces)


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    """Return the rules of a list, of one call unless there may be many."""
    more = '(", " call)*' if many else ""
    return "\n".join([f'calls: {marker(OPEN)} "[" call {more} "]"', *call_rules(tools)])


GRANITE = CallFormat(GraniteParser, _lark, (OPEN,))
