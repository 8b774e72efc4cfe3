"""Parses calls of MiniMax-M2: a section of <invoke name="NAME"> with <parameter name="KEY">VALUE</parameter> inside."""

from collections.abc import Callable, Sequence

from cluster.api.tools.base import CallDelta, CallFormat, Piece, Tool, lark_string
from cluster.api.tools.reader import Reader
from cluster.api.tools.typed_values import ArgumentWriter, schemas, text_rule, value_rules

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
CALL, CALL_END = '<invoke name="', "</invoke>"
KEY, VALUE_END = '<parameter name="', "</parameter>"
NAME_END = '">'


class MiniMaxParser:
    """Splits content and calls. Text between calls is left out; so is white space next to the section."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._reader = Reader()
        self._raw = ""  # of a section or call that was not returned yet; it becomes content if there is none
        self._at = self._content
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """See CallParser."""
        self._reader.text += text
        pieces: list[Piece] = []
        while self._at(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """See CallParser."""
        rest = self._reader.rest()
        if self._at == self._value and self._writer.in_string:
            return [CallDelta(self._num_calls, None, self._writer.piece(rest))] if rest else []
        if self._at == self._content:
            rest = rest.strip() if self._num_calls else rest
        else:
            rest = self._raw + rest if self._raw else ""
        return [rest] if rest else []

    def _content(self, pieces: list[Piece]) -> bool:
        """Read content up to a section; return whether one begins."""
        shown, self._raw, found = self._reader.content(OPEN)
        if shown:
            pieces.append(shown)
        if found:
            self._at = self._between_calls
        return found

    def _between_calls(self, pieces: list[Piece]) -> bool:
        """Read up to the next call or the end of the section."""
        before, mark = self._reader.take(CALL, CLOSE)
        if self._raw:
            self._raw += before + mark
        if mark == CALL:
            self._raw = self._raw or mark
            self._at = self._name
        elif mark:
            self._leave(pieces)
        return bool(mark)

    def _name(self, pieces: list[Piece]) -> bool:
        """Read the name of a call; an unknown one is no call."""
        name, mark = self._reader.wait(NAME_END, CALL, CLOSE)
        tool = self._tools.get(name)
        if mark == NAME_END and tool is not None:
            pieces.append(CallDelta(self._num_calls, tool.name))
            self._raw, self._writer = "", ArgumentWriter(tool)
            self._at = self._between_values
            return True
        if mark:
            self._raw += name + mark
        if mark == CLOSE:
            self._leave(pieces)
        elif mark == NAME_END:
            self._at = self._between_calls
        return bool(mark)

    def _between_values(self, pieces: list[Piece]) -> bool:
        """Read up to the next argument or the end of the call."""
        _, mark = self._reader.take(KEY, CALL_END, CLOSE)
        if mark == KEY:
            self._at = self._key
        elif mark:
            pieces.append(CallDelta(self._num_calls, None, self._writer.close()))
            self._num_calls += 1
            self._at = self._between_calls
            if mark == CLOSE:
                self._leave(pieces)
        return bool(mark)

    def _key(self, pieces: list[Piece]) -> bool:
        key, mark = self._reader.wait(NAME_END)
        if mark:
            pieces.append(CallDelta(self._num_calls, None, self._writer.begin(key)))
            self._at = self._value
        return bool(mark)

    def _value(self, pieces: list[Piece]) -> bool:
        """Pass a value on: a string as it comes, other values when they are complete."""
        writer = self._writer
        value, mark = (self._reader.take if writer.in_string else self._reader.wait)(VALUE_END)
        text = writer.end(value) if mark else writer.piece(value)
        if text:
            pieces.append(CallDelta(self._num_calls, None, text))
        if mark:
            self._at = self._between_values
        return bool(mark)

    def _leave(self, pieces: list[Piece]) -> None:
        """Go on with content behind a section; a section without a call is content itself."""
        if self._raw:
            pieces.append(self._raw)
        self._reader.trims = not self._raw
        self._raw = ""
        self._at = self._content


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    """Return the rules of calls; strings are free texts, or one of the listed ones."""
    line, end = lark_string("\n"), lark_string(VALUE_END)
    rules = [f"calls: {marker(OPEN)} {line} call {'call*' if many else ''} {marker(CLOSE)}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    rules.append(text_rule(VALUE_END, end))
    for i, tool in enumerate(tools):
        arguments = []
        for key, (value, required) in value_rules(i, tool, end).items():
            pair = f"{lark_string(KEY + key + NAME_END)} {value} {line}"
            arguments.append(pair if required else f"({pair})?")
        head, tail = (
            lark_string(f"{CALL}{tool.name}{NAME_END}\n"),
            lark_string(f"{CALL_END}\n"),
        )
        rules.append(f"call_{i}: {head} {' '.join(arguments)} {tail}")
    return "\n".join(rules)


MINIMAX_M2 = CallFormat(MiniMaxParser, _lark, (OPEN, CLOSE), schemas=schemas)
