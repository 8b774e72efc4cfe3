"""Parses calls of GLM-4.5 and later: <tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> pairs.

A value is a string as it is, or JSON; the schema of the tool decides, because both can look the same. The arguments
are returned as JSON text; strings are passed on as they arrive.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.api.tools.base import (
    CallDelta,
    CallFormat,
    Piece,
    Schemas,
    Tool,
    lark_string,
    possible_start,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser:
    """Splits content and calls. Text between calls is content, without the white space next to a call."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._strings = {tool.name: _string_keys(tool.parameters) for tool in tools}
        self._text = ""  # read, but not understood yet
        self._raw = ""  # of a call that was not returned yet; it becomes content if there is none
        self._at = self._content
        self._name = ""
        self._num_calls = self._num_arguments = 0
        self._in_string = False
        self._trims = False  # white space at the beginning of what is shown next

    def push(self, text: str) -> list[Piece]:
        """See CallParser."""
        self._text += text
        pieces: list[Piece] = []
        while self._at(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """See CallParser."""
        rest, self._text = self._text, ""
        if self._at == self._value and self._in_string:
            return [CallDelta(self._num_calls, None, _escaped(rest))] if rest else []
        if self._at == self._content:
            rest = rest.strip() if self._num_calls else rest
        else:
            rest = self._raw + rest if self._raw else ""
        return [rest] if rest else []

    def _content(self, pieces: list[Piece]) -> bool:
        """Read content up to a call; return whether one begins."""
        before, found, after = self._text.partition(OPEN)
        if self._trims:
            before = before.lstrip()
            self._trims = not before
        keep = 0 if found else possible_start(before, OPEN)
        shown = before[: len(before) - keep].rstrip()
        if found:
            self._text, self._raw = after, before[len(shown) :] + found
            self._at = self._head
        else:
            self._text = before[len(shown) :]
        if shown:
            pieces.append(shown)
        return bool(found)

    def _head(self, pieces: list[Piece]) -> bool:
        """Read the name up to the first argument or the end of the call."""
        head, mark = self._wait(KEY, CLOSE, OPEN)
        if not mark:
            return False
        self._name = head.strip()
        if mark == OPEN or self._name not in self._strings:
            if mark == OPEN:
                self._text = OPEN + self._text
            else:
                head += mark
            pieces.append(self._raw + head)
            self._raw, self._at = "", self._content
            return True
        self._raw, self._num_arguments = "", 0
        pieces.append(CallDelta(self._num_calls, self._name))
        if mark == CLOSE:
            self._end(pieces)
        else:
            self._at = self._key
        return True

    def _between(self, pieces: list[Piece]) -> bool:
        """Read up to the next argument or the end of the call."""
        _, mark = self._wait(KEY, CLOSE, OPEN)
        if mark == KEY:
            self._at = self._key
        elif mark:
            self._end(pieces)
            self._text = OPEN + self._text if mark == OPEN else self._text
        return bool(mark)

    def _key(self, pieces: list[Piece]) -> bool:
        """Read a key, and all up to its value."""
        key, mark = self._wait(VALUE, CLOSE)
        if mark == CLOSE:
            self._end(pieces)
        elif mark:
            key = key.partition(KEY_END)[0].strip()
            begin = ", " if self._num_arguments else "{"
            self._num_arguments += 1
            self._in_string = key in self._strings[self._name]
            quote = '"' if self._in_string else ""
            text = f"{begin}{json.dumps(key, ensure_ascii=False)}: {quote}"
            pieces.append(CallDelta(self._num_calls, None, text))
            self._at = self._value
        return bool(mark)

    def _value(self, pieces: list[Piece]) -> bool:
        """Pass a value on: a string as it comes, other values when they are complete."""
        value, mark = self._wait(VALUE_END)
        if not self._in_string:
            if mark:
                pieces.append(CallDelta(self._num_calls, None, _json_value(value)))
        else:
            if not mark:
                cut = len(self._text) - possible_start(self._text, VALUE_END)
                value, self._text = self._text[:cut], self._text[cut:]
            text = _escaped(value) + ('"' if mark else "")
            if text:
                pieces.append(CallDelta(self._num_calls, None, text))
        if mark:
            self._at = self._between
        return bool(mark)

    def _end(self, pieces: list[Piece]) -> None:
        end = "}" if self._num_arguments else "{}"
        pieces.append(CallDelta(self._num_calls, None, end))
        self._num_calls += 1
        self._trims = True
        self._at = self._content

    def _wait(self, *marks: str) -> tuple[str, str]:
        """Return (text up to the first of the marks, that mark), or nothing until there is one."""
        found = [(self._text.find(mark), mark) for mark in marks if mark in self._text]
        if not found:
            return "", ""
        position, mark = min(found)
        before, self._text = self._text[:position], self._text[position + len(mark) :]
        return before, mark


def _escaped(text: str) -> str:
    """Return text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_value(text: str) -> str:
    """Return a value as JSON; text that is none becomes a string."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _properties(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    found = (parameters or {}).get("properties")
    return found if isinstance(found, dict) else {}


def _is_string(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


def _string_keys(parameters: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the arguments that are strings by their schema."""
    return frozenset(key for key, schema in _properties(parameters).items() if _is_string(schema))


def _schemas(index: int, tool: Tool) -> Schemas:
    """Return the schemas of the arguments that are not strings, each with the definitions of the whole."""
    parameters = tool.parameters or {}
    shared: dict[str, Any] = {
        key: parameters[key] for key in ("$defs", "definitions") if key in parameters
    }
    return {
        f"args_{index}_{number}": (f".properties.{key}", {**schema, **shared})
        for number, (key, schema) in enumerate(_properties(parameters).items())
        if isinstance(schema, dict) and not _is_string(schema)
    }


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    """Return the rules of calls; strings are free texts, or one of the listed ones."""
    rules = ["calls: call" + (' ("\\n" call)*' if many else "")]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    rules.append(_text_rule(marker(VALUE_END)))
    for i, tool in enumerate(tools):
        required = (tool.parameters or {}).get("required") or ()
        arguments = []
        for number, (key, schema) in enumerate(_properties(tool.parameters).items()):
            head = f"{marker(KEY)} {lark_string(key)} {marker(KEY_END)} {lark_string(chr(10))}"
            value = _value_rule(schema, f"@args_{i}_{number}", marker(VALUE_END))
            pair = f"{head} {marker(VALUE)} {value} {lark_string(chr(10))}"
            arguments.append(pair if key in required else f"({pair})?")
        name = lark_string(f"{tool.name}\n")
        rules.append(f"call_{i}: {marker(OPEN)} {name} {' '.join(arguments)} {marker(CLOSE)}")
    return "\n".join(rules)


def _text_rule(end: str) -> str:
    """Return the rule of a free text with its end, which is a token or a text."""
    if end.startswith("<["):
        return f"arg_text: ARG_TEXT? {end}\nARG_TEXT: /(.|\\n)+/"
    escaped = VALUE_END.replace("/", "\\/")
    return f"arg_text[lazy]: /(.|\\n)*{escaped}/"


def _value_rule(schema: Any, rule: str, end: str) -> str:
    if not _is_string(schema):
        return f"{rule} {end}"
    listed = [text for text in schema.get("enum", ()) if isinstance(text, str)]
    if "const" in schema and isinstance(schema["const"], str):
        listed = [schema["const"]]
    if not listed:
        return "arg_text"
    return f"({' | '.join(map(lark_string, listed))}) {end}"


GLM45 = CallFormat(
    GlmParser, _lark, (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END), schemas=_schemas
)
