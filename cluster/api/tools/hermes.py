"""Parses calls of Hermes and Qwen models: any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from collections.abc import Callable, Sequence

from cluster.api.tools.base import CallDelta, CallFormat, Piece, Tool, lark_string
from cluster.api.tools.call_scanner import CallScanner
from cluster.api.tools.marked_calls import MarkedCallParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(MarkedCallParser):
    """Each call has markers of its own, around one JSON object."""

    def __init__(self, _tools: Sequence[Tool]) -> None:
        super().__init__(OPEN)

    def _cut_arguments(self, rest: str) -> list[Piece] | None:
        return None  # arguments are passed on as they arrive

    def _opened(self, pieces: list[Piece]) -> bool:
        self._scanner = CallScanner()
        self._at = self._call
        return True

    def _call(self, pieces: list[Piece]) -> bool:
        """Read what has arrived of a call; a broken one is content, or ends at what was passed on."""
        scanner, text = self._scanner, self._reader.rest()
        was_started = scanner.started
        arguments, num_read = scanner.push(text)
        self._reader.text = text[num_read:]
        if scanner.started:
            if not was_started:
                pieces.append(CallDelta(self._num_calls, scanner.name))
                self._raw = ""
            if arguments:
                pieces.append(CallDelta(self._num_calls, None, arguments))
            if scanner.ended or scanner.broken:
                self._num_calls += 1
                self._at = self._behind
        else:
            self._raw += text[:num_read]
            if scanner.broken:
                pieces.append(self._raw)
                self._raw, self._at, self._reader.trims = "", self._content, False
        return bool(text)

    def _behind(self, pieces: list[Piece]) -> bool:
        """Skip to the end of the call, or to the next call if the end is missing."""
        _, mark = self._reader.take(CLOSE, OPEN)
        if mark:
            self._reader.text = self._reader.text if mark == CLOSE else OPEN + self._reader.text
            self._reader.trims = True
            self._at = self._content
        return bool(mark)


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    """Return the rules of calls as the chat templates of these models write them."""
    rules = ["calls: call" + (' ("\\n" call)*' if many else "")]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        head = lark_string(f'\n{{"name": {lark_string(tool.name)}, "arguments": ')
        end = lark_string("}\n")
        rules.append(f"call_{i}: {marker(OPEN)} {head} @args_{i} {end} {marker(CLOSE)}")
    return "\n".join(rules)


HERMES = CallFormat(HermesParser, _lark, (OPEN, CLOSE), openings=(OPEN,))
