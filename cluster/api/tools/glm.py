"""Parses calls of GLM-4.5 and later: <tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> pairs."""

from collections.abc import Callable, Sequence

from cluster.api.tools.base import CallDelta, CallFormat, Piece, Tool, lark_string
from cluster.api.tools.marked_calls import MarkedCallParser
from cluster.api.tools.typed_values import ArgumentWriter, schemas, text_rule, value_rules

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser(MarkedCallParser):
    """Each call has markers of its own."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(OPEN)
        self._tools = {tool.name: tool for tool in tools}

    def _cut_arguments(self, rest: str) -> list[Piece] | None:
        if self._at != self._value or not self._writer.in_string:
            return None
        return [CallDelta(self._num_calls, None, self._writer.piece(rest))] if rest else []

    def _opened(self, pieces: list[Piece]) -> bool:
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
            self._raw, self._at, self._reader.trims = "", self._content, False
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
        """Pass a value on as it comes."""
        text, ended = self._writer.read(self._reader, VALUE_END)
        if text:
            pieces.append(CallDelta(self._num_calls, None, text))
        if ended:
            self._at = self._between
        return bool(ended)

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


GLM45 = CallFormat(
    GlmParser,
    _lark,
    (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    schemas=schemas,
    openings=(OPEN,),
)
