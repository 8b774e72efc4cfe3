"""Parses calls as plain JSON: the answer is {"name": ..., "arguments": {...}}, or several, in a list or a sequence."""

from collections.abc import Callable, Sequence

from cluster.api.tools.base import CallDelta, CallFormat, Piece, Tool, lark_string
from cluster.api.tools.call_scanner import CallScanner

_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
_BETWEEN = " \t\r\n,;[]"  # allowed before, between and after calls


class JsonParser:
    """Splits content and calls. An answer that does not begin with a call of a known tool is content as a whole."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = frozenset(tool.name for tool in tools)
        self._raw = ""  # read, but not returned yet
        self._scanner = CallScanner(_KEYS)
        self._num_calls = 0
        self._is_content = False

    def push(self, text: str) -> list[Piece]:
        """See CallParser."""
        pieces: list[Piece] = []
        while text and not self._is_content:
            text = self._take(text, pieces)
        if text:
            pieces.append(text)
        return pieces

    def flush(self) -> list[Piece]:
        """See CallParser."""
        rest, self._raw = self._raw, ""
        if self._num_calls and not rest.strip(_BETWEEN):
            return []
        return [rest] if rest else []

    def _take(self, text: str, pieces: list[Piece]) -> str:
        scanner = self._scanner
        if not scanner.started and not self._raw.strip(_BETWEEN):
            begun = text.lstrip(_BETWEEN)  # between calls
            self._raw += text[: len(text) - len(begun)]
            text = begun
            if not text:
                return ""
        was_started = scanner.started
        arguments, num_read = scanner.push(text)
        if not scanner.started:
            self._raw += text[:num_read]
            if scanner.broken:
                self._give_up(pieces)
            return text[num_read:]
        if not was_started:
            if scanner.name not in self._names or not scanner.has_arguments:
                self._raw += text[:num_read]
                self._give_up(pieces)
                return text[num_read:]
            self._raw = ""
            pieces.append(CallDelta(self._num_calls, scanner.name, call_id=self._call_id()))
        if arguments:
            pieces.append(CallDelta(self._num_calls, None, arguments))
        if scanner.ended or scanner.broken:
            self._num_calls += 1
            self._scanner = CallScanner(_KEYS)
        return text[num_read:]

    def _call_id(self) -> str | None:
        """Return the id of a call that begins; None = any."""
        return None

    def _give_up(self, pieces: list[Piece]) -> None:
        self._is_content = True
        pieces.append(self._raw)
        self._raw = ""


def _lark(tools: Sequence[Tool], many: bool, _marker: Callable[[str], str]) -> str:
    """Return the rules of one object, or of a list."""
    calls = "calls: call" + (' | "[" call (", " call)* "]"' if many else "")
    return "\n".join([calls, *call_rules(tools)])


def call_rules(tools: Sequence[Tool]) -> list[str]:
    """Return the rules of one object: `call`, and those that it needs."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = lark_string(f'{{"name": {lark_string(tool.name)}, "arguments": ')
        rules.append(f'call_{i}: {head} @args_{i} "}}"')
    return rules


JSON = CallFormat(JsonParser, _lark)
