"""Parses calls of MiniMax-M2: a section of <invoke name="NAME"> with <parameter name="KEY">VALUE</parameter> inside."""

from collections.abc import Callable, Sequence

from cluster.api.tools.base import CallDelta, CallFormat, Piece, Tool, lark_string
from cluster.api.tools.marked_calls import SectionedCallParser
from cluster.api.tools.typed_values import ArgumentWriter, schemas, text_rule, value_rules

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
CALL, CALL_END = '<invoke name="', "</invoke>"
KEY, VALUE_END = '<parameter name="', "</parameter>"
NAME_END = '">'


class MiniMaxParser(SectionedCallParser):
    """Each argument of a call has markers of its own."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(OPEN, CALL, CLOSE)
        self._tools = {tool.name: tool for tool in tools}

    def _cut_arguments(self, rest: str) -> list[Piece] | None:
        if self._at != self._value or not self._writer.in_string:
            return None
        return [CallDelta(self._num_calls, None, self._writer.piece(rest))] if rest else []

    def _head(self, pieces: list[Piece]) -> bool:
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
            self._at = self._opened
        return bool(mark)

    def _between_values(self, pieces: list[Piece]) -> bool:
        """Read up to the next argument or the end of the call."""
        _, mark = self._reader.take(KEY, CALL_END, CLOSE)
        if mark == KEY:
            self._at = self._key
        elif mark:
            pieces.append(CallDelta(self._num_calls, None, self._writer.close()))
            self._num_calls += 1
            self._at = self._opened
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
        """Pass a value on as it comes."""
        text, ended = self._writer.read(self._reader, VALUE_END)
        if text:
            pieces.append(CallDelta(self._num_calls, None, text))
        if ended:
            self._at = self._between_values
        return ended


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
