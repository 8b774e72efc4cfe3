"""Text that arrives in pieces, read up to markers. Knows nothing of particular formats."""

from collections.abc import Sequence

from cluster.api.tools.base import possible_start


class Reader:
    """`text` is what was read but not understood yet."""

    def __init__(self) -> None:
        self.text = ""
        self.trims = False  # white space at the beginning of what is shown next

    def content(self, *openings: str) -> tuple[str, str, str]:
        """Read content up to the first of the openings; return (what to show, white space and opening, the opening).

        White space in front of an opening, and what may be the beginning of one, is held back. Without an opening the
        second and the third are empty.
        """
        before, found = self._split(openings)
        after = self.text[len(before) + len(found) :]
        if self.trims:
            before = before.lstrip()
            self.trims = not before
        keep = 0 if found else max(possible_start(before, opening) for opening in openings)
        shown = before[: len(before) - keep].rstrip()
        held = before[len(shown) :]
        self.text = after if found else held
        return shown, held + found if found else "", found

    def take(self, *marks: str) -> tuple[str, str]:
        """Return (text up to the first of the marks, that mark); without one, all text that holds no part of any."""
        before, mark = self.wait(*marks)
        if not mark:
            keep = max(possible_start(self.text, each) for each in marks)
            cut = len(self.text) - keep
            before, self.text = self.text[:cut], self.text[cut:]
        return before, mark

    def wait(self, *marks: str) -> tuple[str, str]:
        """Return (text up to the first of the marks, that mark), or nothing until there is one."""
        before, mark = self._split(marks)
        if not mark:
            return "", ""
        self.text = self.text[len(before) + len(mark) :]
        return before, mark

    def _split(self, marks: Sequence[str]) -> tuple[str, str]:
        """Return (text up to the first of the marks, that mark), or all text and nothing."""
        found = [(self.text.find(mark), mark) for mark in marks if mark in self.text]
        if not found:
            return self.text, ""
        position, mark = min(found, key=lambda item: item[0])
        return self.text[:position], mark

    def rest(self) -> str:
        """Return the text and forget it."""
        rest, self.text = self.text, ""
        return rest
