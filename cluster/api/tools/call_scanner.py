"""Reads one call, {"name": ..., "arguments": {...}}, character by character. Knows nothing of the text around it.

Arguments are passed on unchanged as they arrive, valid JSON or not. "parameters" is another name for them.
"""

import json
from enum import Enum, auto

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _At(Enum):
    """The expected next part; all parts except OPEN are inside the braces of the call."""

    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE_START = auto()
    VALUE = auto()
    COMMA = auto()


class CallScanner:
    """Reads one call. `name` is set before the first arguments.

    started        name and arguments were found; `push` returns text of the arguments
    has_arguments  the model wrote arguments
    ended          the closing brace was read
    broken         the text is not a call: no object, no name, or an unknown key before the arguments

    known_keys: the allowed keys; None = any.
    """

    def __init__(self, known_keys: frozenset[str] | None = None) -> None:
        self._known_keys = known_keys
        self.name: str | None = None
        self.started = self.has_arguments = self.ended = self.broken = False
        self._at = _At.OPEN
        self._key = ""
        self._value: list[str] = []  # of a key, or of a value that is not passed on as it comes
        self._is_arguments = self._streams = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._early: str | None = None  # arguments that came before the name

    def push(self, text: str) -> tuple[str, int]:
        """Return (arguments that `text` adds, number of characters read); stops where the call ends or breaks."""
        added: list[str] = []
        for position, char in enumerate(text):
            self._step(char, added)
            if self.ended or self.broken:
                return "".join(added), position + 1
        return "".join(added), len(text)

    def _step(self, char: str, added: list[str]) -> None:
        at = self._at
        if at is _At.VALUE:
            self._in_value(char, added)
        elif at is _At.KEY and (self._value or char == '"'):
            self._in_key(char)
        elif char in _SPACE:
            return
        elif at is _At.OPEN and char == "{":
            self._at = _At.KEY
        elif at is _At.COLON and char == ":":
            self._at = _At.VALUE_START
        elif at is _At.VALUE_START:
            self._begin_value(char, added)
        elif at is _At.COMMA and char == ",":
            self._at = _At.KEY
        elif at in (_At.COMMA, _At.KEY) and char == "}":
            self._end(added)
        else:
            self.broken = True

    def _in_key(self, char: str) -> None:
        self._value.append(char)
        if self._string_goes_on(char):
            return
        key = _loads("".join(self._value))
        self._value = []
        self._key = key if isinstance(key, str) else ""
        self._at = _At.COLON
        if not self.started and self._known_keys is not None:
            self.broken = self._key not in self._known_keys

    def _begin_value(self, char: str, added: list[str]) -> None:
        if char in ",:}]":
            self.broken = True
            return
        self._at = _At.VALUE
        self._depth = 0
        self._is_arguments = self._key in _ARGUMENTS and self.name is not None and not self.started
        if self._is_arguments:
            self.started = self.has_arguments = True
            self._streams = char in "{["
        self._in_value(char, added)

    def _in_value(self, char: str, added: list[str]) -> None:
        if not self._in_string and self._depth == 0 and self._value and char in ",}" + _SPACE:
            self._end_value(added)  # a number or a word ends where something else begins
            self._step(char, added)
            return
        (added if self._streams else self._value).append(char)
        if self._in_string or char == '"':
            if not self._string_goes_on(char) and self._depth == 0:
                self._end_value(added)
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self._end_value(added)

    def _string_goes_on(self, char: str) -> bool:
        """Read a character of a string; return False at its closing quote."""
        if not self._in_string:
            self._in_string = True
        elif self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
        return self._in_string

    def _end_value(self, added: list[str]) -> None:
        self._at = _At.COMMA
        if self._streams:
            self._streams = False
            return
        raw, self._value = "".join(self._value), []
        if self._key == "name" and self.name is None:
            name = _loads(raw)
            if isinstance(name, str) and name:
                self.name = name
        elif self._is_arguments:
            added.append(_arguments(raw))
        elif self._key in _ARGUMENTS and not self.started and self._early is None:
            self._early = _arguments(raw)
            self.has_arguments = True

    def _end(self, added: list[str]) -> None:
        self.ended = True
        if self.started:
            return
        if self.name is None:
            self.broken = True
            return
        self.started = True
        added.append("{}" if self._early is None else self._early)


def _arguments(raw: str) -> str:
    """Convert arguments that are not an object: some models write a string of JSON, or null for none."""
    value = _loads(raw)
    if isinstance(value, str):
        return value
    return "{}" if raw == "null" else raw


def _loads(raw: str) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
