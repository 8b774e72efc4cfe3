"""Leaves out the tags of ERNIE-4.5-Thinking around an answer: <response> behind the thought and </response> at its end.

Knows nothing of tools.
"""

from enum import Enum, auto

from cluster.api.answer.reasoning import Splitter
from cluster.api.tools.base import possible_start

OPEN, CLOSE = "<response>", "</response>"


class _At(Enum):
    """Where the content is."""

    BEGINNING = auto()
    INSIDE = auto()
    BEHIND = auto()  # or there are no tags


class ResponseTags:
    """Drops the tags and the white space next to them. Without the first tag, an answer stays as it is."""

    def __init__(self, thoughts: Splitter) -> None:
        self._thoughts = thoughts
        self._at = _At.BEGINNING
        self._held = ""
        self._trims = False  # white space at the beginning of what is shown next

    def push(self, text: str) -> tuple[str, str]:
        """See Splitter."""
        reasoning, content = self._thoughts.push(text)
        return reasoning, self._shown(content)

    def flush(self) -> tuple[str, str]:
        """See Splitter."""
        reasoning, content = self._thoughts.flush()
        shown = self._shown(content)
        held, self._held = self._held, ""
        cut = self._at is _At.INSIDE and CLOSE.startswith(held.strip())
        return reasoning, shown if cut else shown + held

    def _shown(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if self._at is _At.BEGINNING:
            begun = text.lstrip()
            if begun != OPEN and OPEN.startswith(begun):
                self._held = text
                return ""
            self._trims = begun.startswith(OPEN)
            self._at = _At.INSIDE if self._trims else _At.BEHIND
            text = begun.removeprefix(OPEN) if self._trims else text
        before = closed = after = ""
        if self._at is _At.INSIDE:
            before, closed, after = self._trimmed(text).partition(CLOSE)
            if not closed:
                shown = before[: len(before) - possible_start(before, CLOSE)].rstrip()
                self._held = before[len(shown) :]
                return shown
            self._at, self._trims, text = _At.BEHIND, True, after
        return before.rstrip() + self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
