"""Parses calls of GLM-4.5 and later: <tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> pairs."""

from collections.abc import Callable, Sequence

from cluster.api.tools.base import CallDelta, CallFormat, Piece, Tool, lark_string
from cluster.api.tools.reader import Reader
from cluster.api.tools.typed_values import ArgumentWriter, schemas, text_rule, value_rules

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser:
    """Splits content and calls. Text between calls is content, without the white space next to a call."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._reader = Reader()
        self._raw = ""  # of a call that was not returned yet; it becomes content if there is none
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
        """Read content up to a call; return whether one begins."""
        shown, self._raw, found = self._reader.content(OPEN)
        if shown:
            pieces.append(shown)
        if found:
            self._at = self._head
        return found

    def _head(self, pieces: list[Piece]) -> bool:
        """Read the name up to the first argument or the end of the call."""
        head, mark = self._reader.wait(KEY, CLOSE, OPEN)
        if not mark:
            return False
        tool = self._tools.get(head.strip())
        if mark == OPEN or tool is None:
            if mark == OPEN:
                self._reader.text = OPEN + self._reader.text
            else:
                head += mark
            pieces.append(self._raw + head)
            self._raw, self._at = "", self._content
            return True
        self._raw, self._writer = "", ArgumentWriter(tool)
        pieces.append(CallDelta(self._num_calls, tool.name))
        if mark == CLOSE:
            self._end(pieces)
        else:
            self._at = self._key
        return True

    def _between(self, pieces: list[Piece]) -> bool:
        """Read up to the next argument or the end of the call."""
        _, mark = self._reader.wait(KEY, CLOSE, OPEN)
        if mark == KEY:
            self._at = self._key
        elif mark:
            self._end(pieces)
            if mark == OPEN:
                self._reader.text = OPEN + self._reader.text
        return bool(mark)

    def _key(self, pieces: list[Piece]) -> bool:
        """Read a key, and all up to its value."""
        key, mark = self._reader.wait(VALUE, CLOSE)
        if mark == CLOSE:
            self._end(pieces)
        elif mark:
            text = self._writer.begin(key.partition(KEY_END)[0].strip())
            pieces.append(CallDelta(self._num_calls, None, text))
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
            self._at = self._between
        return bool(mark)

    def _end(self, pieces: list[Piece]) -> None:
        pieces.append(CallDelta(self._num_calls, None, self._writer.close()))
        self._num_calls += 1
        self._reader.trims = True
        self._at = self._content


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    """Return the rules of calls; strings are free texts, or one of the listed ones."""
    rules = ["calls: call" + (' ("\\n" call)*' if many else "")]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    rules.append(text_rule(VALUE_END, marker(VALUE_END)))
    line = lark_string("\n")
    for i, tool in enumerate(tools):
        arguments = []
        for key, (value, required) in value_rules(i, tool, marker(VALUE_END)).items():
            head = f"{marker(KEY)} {lark_string(key)} {marker(KEY_END)} {line}"
            pair = f"{head} {marker(VALUE)} {value} {line}"
            arguments.append(pair if required else f"({pair})?")
        name = lark_string(f"{tool.name}\n")
        rules.append(f"call_{i}: {marker(OPEN)} {name} {' '.join(arguments)} {marker(CLOSE)}")
    return "\n".join(rules)


GLM45 = CallFormat(GlmParser, _lark, (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END), schemas=schemas)
