"""Text that arrives in pieces, read up to markers. Knows nothing of particular formats."""

from cluster.api.tools.base import possible_start


class Reader:
    """`text` is what was read but not understood yet."""

    def __init__(self) -> None:
        self.text = ""
        self.trims = False  # white space at the beginning of what is shown next

    def content(self, opening: str) -> tuple[str, str, bool]:
        """Read content up to `opening`; return (what to show, white space and opening, whether it was found).

        White space in front of the opening, and what may be the beginning of it, is held back.
        """
        before, found, after = self.text.partition(opening)
        if self.trims:
            before = before.lstrip()
            self.trims = not before
        keep = 0 if found else possible_start(before, opening)
        shown = before[: len(before) - keep].rstrip()
        held = before[len(shown) :]
        self.text = after if found else held
        return shown, held + found if found else "", bool(found)

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
        found = [(self.text.find(mark), mark) for mark in marks if mark in self.text]
        if not found:
            return "", ""
        position, mark = min(found, key=lambda item: item[0])
        before, self.text = self.text[:position], self.text[position + len(mark) :]
        return before, mark

    def rest(self) -> str:
        """Return the text and forget it."""
        rest, self.text = self.text, ""
        return rest
