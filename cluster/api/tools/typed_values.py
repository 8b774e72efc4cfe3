"""Arguments that models write one by one, strings as they are and other values as JSON.

The schema of the tool decides what a value is, because both can look the same. Knows nothing of particular formats.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any

from cluster.api.tools.base import Schemas, Tool, lark_string
from cluster.api.tools.reader import Reader
from cluster.api.tools.value_types import ALL, ANY, ValueTypes, type_of, value_types

TEXT_RULE = "arg_text"


class ArgumentWriter:
    """Writes the arguments of one call as JSON text, as they arrive. Strings are passed on in pieces."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._types = ANY
        self._num_arguments = 0
        self.in_string = False

    def begin(self, key: str) -> str:
        """Begin an argument."""
        comma = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._types = _types(self._tool, key)
        self.in_string = self._types.types == {"string"}
        return f"{comma}{_json(key)}: " + ('"' if self.in_string else "")

    def read(self, reader: Reader, *ends: str) -> tuple[str, str]:
        """Return (what arrived of a value, the end that came): a string in pieces, other values when complete."""
        value, mark = (reader.take if self.in_string else reader.wait)(*ends)
        return self.end(value) if mark else self.piece(value), mark

    def piece(self, text: str) -> str:
        """Write a part of a string."""
        return _json(text)[1:-1]

    def end(self, text: str) -> str:
        """Write the rest of a string, or the whole of another value."""
        if self.in_string:
            self.in_string = False
            return self.piece(text) + '"'
        return _value(text, self._types.types)

    def close(self) -> str:
        """End the call."""
        return "}" if self._num_arguments else "{}"


def _value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a complete value of these types; text that is none of them becomes a string.

    Models also write values as Python does, because chat templates such as Qwen3-Coder's write True, None and
    ['a'] into the conversation. Where a string is possible, such a text is one; only None is null where null is listed.
    """
    try:
        kind = type_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        kind = ""
    if kind and (kind in types or "string" not in types):
        return text.strip()
    word = text.strip()
    if word.lower() in ("null", "none") and "null" in types and types != ALL:
        return "null"
    if "string" not in types:
        if word.lower() in ("true", "false"):
            return word.lower()
        if word.startswith(("[", "{")):
            return _python(word)
    return _json(text)


def _python(text: str) -> str:
    """Return the JSON of a list or a dictionary that is written as in Python; a string if it is neither."""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _json(text)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    """Refuse NaN and Infinity, which Python reads."""
    raise ValueError(constant)


def properties(tool: Tool) -> dict[str, Any]:
    """Return the schema of each argument by its name."""
    found = (tool.parameters or {}).get("properties")
    return found if isinstance(found, dict) else {}


def schemas(index: int, tool: Tool) -> Schemas:
    """Return the schemas of the arguments that are no texts, each with the definitions of the whole."""
    parameters: Mapping[str, Any] = tool.parameters or {}
    shared: dict[str, Any] = {
        key: parameters[key] for key in ("$defs", "definitions") if key in parameters
    }
    return {
        f"args_{index}_{number}": (f".properties.{key}", {**schema, **shared})
        for number, (key, schema) in enumerate(properties(tool).items())
        if isinstance(schema, dict) and not _types(tool, key).is_text
    }


def text_rule(end_text: str, end: str) -> str:
    """Return the Lark rule of a free text up to its end, which the grammar writes as `end`: a token or a text."""
    if end.startswith("<["):
        return f"{TEXT_RULE}: ARG_TEXT? {end}\nARG_TEXT: /(.|\\n)+/"
    escaped = end_text.replace("/", "\\/")
    return f"{TEXT_RULE}[lazy]: /(.|\\n)*{escaped}/"


def value_rules(index: int, tool: Tool, end: str) -> dict[str, tuple[str, bool]]:
    """Return by argument: (what matches its value with the end behind it, whether it is required)."""
    required = (tool.parameters or {}).get("required") or ()
    found = {}
    for number, key in enumerate(properties(tool)):
        rule = f"@args_{index}_{number} {end}"
        types = _types(tool, key)
        if types.is_text:
            texts = types.texts
            rule = f"({' | '.join(map(lark_string, texts))}) {end}" if texts else TEXT_RULE
        found[key] = (rule, key in required)
    return found


def _types(tool: Tool, key: str) -> ValueTypes:
    """Return the types of an argument; of one without a schema all."""
    parameters = tool.parameters or {}
    found = properties(tool)
    schema = found[key] if key in found else parameters.get("additionalProperties")
    return value_types(schema, parameters)
