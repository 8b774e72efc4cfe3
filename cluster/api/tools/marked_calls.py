"""Parsers by states, and of calls between markers: the text that is held back, and the white space around calls.

Knows nothing of particular formats.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from cluster.api.tools.base import Piece
from cluster.api.tools.reader import Reader

State = Callable[[list[Piece]], bool]


class StateParser:
    """Reads text in states. A state is a method that appends pieces and returns whether it read something.

    A state sets the next state, `_at`.
    """

    def __init__(self, first: State) -> None:
        self._reader = Reader()
        self._at = first
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """See CallParser."""
        self._reader.text += text
        pieces: list[Piece] = []
        while self._at(pieces):
            pass
        return pieces


class MarkedCallParser(StateParser, ABC):
    """Splits content and calls. The text between calls is content, without the white space next to a call.

    A state reads up to the next marker, and returns whether it found one. White space behind the calls is left out.
    """

    def __init__(self, *openings: str) -> None:
        super().__init__(self._content)
        self._openings = openings
        self._raw = ""  # of a section or call that was not returned yet; it becomes content if there is no call

    def flush(self) -> list[Piece]:
        """See CallParser."""
        rest = self._reader.rest()
        cut = self._cut_arguments(rest)
        if cut is not None:
            return cut
        if self._at == self._content:
            rest = rest.strip() if self._num_calls else rest
        else:
            rest = self._raw + rest if self._raw else ""
        return [rest] if rest else []

    def _content(self, pieces: list[Piece]) -> bool:
        """State: content up to an opening marker."""
        shown, self._raw, opening = self._reader.content(*self._openings)
        if shown:
            pieces.append(shown)
        if opening:
            self._at = self._state_behind(opening)
        return bool(opening)

    def _state_behind(self, opening: str) -> State:
        """Return the state behind an opening marker."""
        return self._opened

    @abstractmethod
    def _opened(self, pieces: list[Piece]) -> bool:
        """State: behind the opening marker."""

    @abstractmethod
    def _cut_arguments(self, rest: str) -> list[Piece] | None:
        """Return the last pieces of arguments that end with `rest`; None outside of arguments."""


class SectionedCallParser(MarkedCallParser):
    """Calls stand in a section of their own: opening, then calls that each begin with `call`, then `close`.

    Text between the calls of a section is left out.

    bare   a call is one without a section, because models sometimes leave out the opening
    """

    def __init__(self, opening: str, call: str, close: str, *, bare: bool) -> None:
        super().__init__(opening, *((call,) if bare else ()))
        self._call = call
        self._close = close
        self._is_bare = False

    def _state_behind(self, opening: str) -> State:
        self._is_bare = opening == self._call
        return self._head if self._is_bare else self._opened

    def _behind_call(self) -> State:
        """Return the state behind the end of a call."""
        return self._bare_end if self._is_bare else self._opened

    def _bare_end(self, pieces: list[Piece]) -> bool:
        """State: behind a call without a section. The end of a section is left out."""
        begun = self._reader.text.lstrip()
        if self._close.startswith(begun) and begun != self._close:
            return False
        self._reader.text = begun.removeprefix(self._close)
        self._leave(pieces)
        return True

    def _opened(self, pieces: list[Piece]) -> bool:
        """State: up to the next call or the end of the section."""
        before, mark = self._reader.take(self._call, self._close)
        if self._raw:
            self._raw += before + mark
        if mark == self._call:
            self._raw = self._raw or mark
            self._at = self._head
        elif mark:
            self._leave(pieces)
        return bool(mark)

    @abstractmethod
    def _head(self, pieces: list[Piece]) -> bool:
        """State: behind the marker of a call."""

    def _leave(self, pieces: list[Piece]) -> None:
        """Continue with content behind a section; a section without a call is content itself."""
        if self._raw:
            pieces.append(self._raw)
        self._reader.trims = not self._raw
        self._raw = ""
        self._at = self._content
