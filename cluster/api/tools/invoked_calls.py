"""Parses calls in a section, each argument between markers: MiniMax-M2's and Qwen3-Coder's."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.api.tools.base import CallDelta, Piece, Tool
from cluster.api.tools.marked_calls import SectionedCallParser
from cluster.api.tools.typed_values import ArgumentWriter


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The markers around a section, a call in it, and an argument of the call.

    name_end     ends the name of a call and of an argument
    value_start  stands before a value, and is no part of it; may be missing
    value_ends   end a value; where two of them end at one place, the longer one comes first
    next_marks   end a value without an end, and are no part of it
    bare         models often leave out `open`: a call of a known tool is one without it
    """

    open: str
    close: str
    call: str
    call_end: str
    key: str
    name_end: str
    value_ends: tuple[str, ...]
    value_start: str = ""
    next_marks: tuple[str, ...] = ()
    bare: bool = False


class InvokedCallParser(SectionedCallParser):
    """Each argument of a call has markers of its own."""

    def __init__(self, marks: CallMarks, tools: Sequence[Tool]) -> None:
        super().__init__(marks.open, marks.call, marks.close, bare=marks.bare)
        self._marks = marks
        self._tools = {tool.name: tool for tool in tools}

    def _cut_arguments(self, rest: str) -> list[Piece] | None:
        if self._at != self._value or not self._writer.in_string:
            return None
        return [CallDelta(self._num_calls, None, self._writer.piece(rest))] if rest else []

    def _head(self, pieces: list[Piece]) -> bool:
        """Read the name of a call; an unknown one is no call."""
        marks = self._marks
        name, mark = self._reader.wait(marks.name_end, marks.call, marks.close)
        tool = self._tools.get(name)
        if mark:
            self._raw += name + mark
        if mark == marks.name_end and tool is not None:
            self._tool = tool
            self._at = self._bare_call if self._is_bare else self._begun
        elif mark == marks.close or (mark == marks.name_end and self._is_bare):
            self._leave(pieces)
        elif mark == marks.name_end:
            self._at = self._opened
        return bool(mark)

    def _bare_call(self, pieces: list[Piece]) -> bool:
        """Decide whether a name without a section is that of a call: an argument or the end of the call follows."""
        begun, ends = self._reader.text.lstrip(), (self._marks.key, self._marks.call_end)
        if begun.startswith(ends):
            self._at = self._begun
            return True
        if any(end.startswith(begun) for end in ends):
            return False
        self._leave(pieces)
        return True

    def _begun(self, pieces: list[Piece]) -> bool:
        """Begin a call of the tool that was read."""
        pieces.append(CallDelta(self._num_calls, self._tool.name))
        self._raw, self._writer = "", ArgumentWriter(self._tool)
        self._at = self._between_values
        return True

    def _between_values(self, pieces: list[Piece]) -> bool:
        """Read up to the next argument or the end of the call."""
        marks = self._marks
        _, mark = self._reader.take(marks.key, marks.call_end, marks.close)
        if mark == marks.key:
            self._at = self._key
        elif mark:
            pieces.append(CallDelta(self._num_calls, None, self._writer.close()))
            self._num_calls += 1
            self._at = self._behind_call()
            if mark == marks.close:
                self._leave(pieces)
        return bool(mark)

    def _key(self, pieces: list[Piece]) -> bool:
        key, mark = self._reader.wait(self._marks.name_end)
        if mark:
            pieces.append(CallDelta(self._num_calls, None, self._writer.begin(key)))
            self._at = self._before_value
        return bool(mark)

    def _before_value(self, pieces: list[Piece]) -> bool:
        """Leave out `value_start`."""
        start, text = self._marks.value_start, self._reader.text
        if len(text) < len(start) and start.startswith(text):
            return False
        self._reader.text = text.removeprefix(start)
        self._at = self._value
        return True

    def _value(self, pieces: list[Piece]) -> bool:
        """Pass a value on as it comes."""
        marks = self._marks
        text, ended = self._writer.read(self._reader, *marks.value_ends, *marks.next_marks)
        if text:
            pieces.append(CallDelta(self._num_calls, None, text))
        if ended:
            if ended in marks.next_marks:
                self._reader.text = ended + self._reader.text
            self._at = self._between_values
        return bool(ended)
