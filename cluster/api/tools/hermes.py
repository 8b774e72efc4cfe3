"""Parses calls of Hermes and Qwen models: any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from collections.abc import Callable, Sequence

from cluster.api.tools.base import CallDelta, CallFormat, Piece, Tool, lark_string, possible_start
from cluster.api.tools.call_scanner import CallScanner

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser:
    """Splits content and calls. Text between calls is content, without the white space next to a call."""

    def __init__(self, _tools: Sequence[Tool]) -> None:
        self._held = ""  # of content: white space, or the beginning of OPEN
        self._raw = ""  # of a call that was not returned yet; it becomes content if the call breaks
        self._scanner: CallScanner | None = None
        self._num_calls = 0
        self._trims = False  # white space behind a call

    def push(self, text: str) -> list[Piece]:
        """See CallParser."""
        pieces: list[Piece] = []
        while text:
            text = (
                self._content(text, pieces) if self._scanner is None else self._call(text, pieces)
            )
        return pieces

    def flush(self) -> list[Piece]:
        """See CallParser."""
        rest = self._raw or ("" if self._scanner is not None else self._held)
        if not self._raw and self._num_calls:
            rest = rest.strip()
        self._held = self._raw = ""
        return [rest] if rest else []

    def _content(self, text: str, pieces: list[Piece]) -> str:
        """Read content up to a call; return the text behind its OPEN."""
        text = self._held + text
        before, found, after = text.partition(OPEN)
        if self._trims:
            before = before.lstrip()
            self._trims = not before
        if found:
            self._held = ""
            self._scanner, self._raw = CallScanner(), OPEN
            shown = before.rstrip()
            self._raw = before[len(shown) :] + OPEN
        else:
            shown = before[: len(before) - possible_start(before, OPEN)].rstrip()
            self._held = before[len(shown) :]
        if shown:
            pieces.append(shown)
        return after

    def _call(self, text: str, pieces: list[Piece]) -> str:
        """Read text of a call; return the text behind it."""
        scanner = self._scanner
        assert scanner is not None
        if scanner.ended:
            return self._after_call(text)
        was_started = scanner.started
        arguments, num_read = scanner.push(text)
        if scanner.started:
            if not was_started:
                pieces.append(CallDelta(self._num_calls, scanner.name))
                self._raw = ""
            if arguments:
                pieces.append(CallDelta(self._num_calls, None, arguments))
            if scanner.broken:  # after its arguments: nothing more of it counts
                scanner.ended = True
            if scanner.ended:
                self._num_calls += 1
            return text[num_read:]
        self._raw += text[:num_read]
        if scanner.broken:
            pieces.append(self._raw)
            self._scanner, self._raw = None, ""
        return text[num_read:]

    def _after_call(self, text: str) -> str:
        """Skip to the end of the call, or to the next call if the end is missing."""
        text = self._held + text
        ends = [(text.find(mark), mark) for mark in (CLOSE, OPEN) if mark in text]
        if not ends:
            keep = max(possible_start(text, CLOSE), possible_start(text, OPEN))
            self._held = text[len(text) - keep :]
            return ""
        position, mark = min(ends)
        self._held, self._scanner, self._trims = "", None, True
        return text[position + len(mark) :] if mark == CLOSE else text[position:]


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    """Return the rules of calls as the chat templates of these models write them."""
    rules = ["calls: call" + (' ("\\n" call)*' if many else "")]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        head = lark_string(f'\n{{"name": {lark_string(tool.name)}, "arguments": ')
        end = lark_string("}\n")
        rules.append(f"call_{i}: {marker(OPEN)} {head} @args_{i} {end} {marker(CLOSE)}")
    return "\n".join(rules)


HERMES = CallFormat(HermesParser, _lark, (OPEN, CLOSE))
