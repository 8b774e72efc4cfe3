"""Parses calls of Granite 3 and Mixtral: a marker, then a JSON list of {"name": ..., "arguments": {...}}."""

from collections.abc import Sequence

from cluster.api.tools.base import Piece, Tool
from cluster.api.tools.json_calls import JsonParser, call_rules


class MarkedListParser(JsonParser):
    """Calls begin the answer. The marker may be missing, where it is a special token that is not shown."""

    def __init__(self, marks: Sequence[str], tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._marks = marks
        self._begin = ""  # up to the first character that decides whether there is a marker
        self._mark: str | None = None  # the marker, empty if there is none; None: not decided yet

    def push(self, text: str) -> list[Piece]:
        """See CallParser."""
        if self._mark is None:
            self._begin += text
            begun = self._begin.lstrip()
            found = next((mark for mark in self._marks if begun.startswith(mark)), "")
            if not found and any(mark.startswith(begun) for mark in self._marks):
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


def list_rules(opening: str, tools: Sequence[Tool], many: bool) -> str:
    """Return the Lark rules of a list behind `opening`, of one call unless there may be many."""
    more = '(", " call)*' if many else ""
    return "\n".join([f'calls: {opening} "[" call {more} "]"', *call_rules(tools)])
