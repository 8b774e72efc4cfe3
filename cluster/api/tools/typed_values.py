"""Arguments that models write one by one, strings as they are and other values as JSON.

The schema of the tool decides what a value is, because both can look the same. Knows nothing of particular formats.
"""

import json
from collections.abc import Mapping
from typing import Any

from cluster.api.tools.base import Schemas, Tool, lark_string
from cluster.api.tools.reader import Reader

TEXT_RULE = "arg_text"


class ArgumentWriter:
    """Writes the arguments of one call as JSON text, as they arrive. Strings are passed on in pieces."""

    def __init__(self, tool: Tool) -> None:
        self._strings = frozenset(
            key for key, schema in properties(tool).items() if _is_string(schema)
        )
        self._num_arguments = 0
        self.in_string = False

    def begin(self, key: str) -> str:
        """Begin an argument."""
        comma = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self.in_string = key in self._strings
        return f"{comma}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self.in_string else "")

    def read(self, reader: Reader, *ends: str) -> tuple[str, bool]:
        """Return (what arrived of a value, whether an end came): a string in pieces, other values when complete."""
        value, mark = (reader.take if self.in_string else reader.wait)(*ends)
        return self.end(value) if mark else self.piece(value), bool(mark)

    def piece(self, text: str) -> str:
        """Write a part of a string."""
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def end(self, text: str) -> str:
        """Write the rest of a string, or the whole of another value; text that is no JSON becomes a string."""
        if self.in_string:
            self.in_string = False
            return self.piece(text) + '"'
        try:
            json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        return text.strip()

    def close(self) -> str:
        """End the call."""
        return "}" if self._num_arguments else "{}"


def _refuse(constant: str) -> None:
    """Refuse NaN and Infinity, which Python reads."""
    raise ValueError(constant)


def properties(tool: Tool) -> dict[str, Any]:
    """Return the schema of each argument by its name."""
    found = (tool.parameters or {}).get("properties")
    return found if isinstance(found, dict) else {}


def schemas(index: int, tool: Tool) -> Schemas:
    """Return the schemas of the arguments that are not strings, each with the definitions of the whole."""
    parameters: Mapping[str, Any] = tool.parameters or {}
    shared: dict[str, Any] = {
        key: parameters[key] for key in ("$defs", "definitions") if key in parameters
    }
    return {
        f"args_{index}_{number}": (f".properties.{key}", {**schema, **shared})
        for number, (key, schema) in enumerate(properties(tool).items())
        if isinstance(schema, dict) and not _is_string(schema)
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
    for number, (key, schema) in enumerate(properties(tool).items()):
        rule = f"@args_{index}_{number} {end}"
        if _is_string(schema):
            listed = [text for text in schema.get("enum", ()) if isinstance(text, str)]
            if isinstance(schema.get("const"), str):
                listed = [schema["const"]]
            rule = f"({' | '.join(map(lark_string, listed))}) {end}" if listed else TEXT_RULE
        found[key] = (rule, key in required)
    return found


def _is_string(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"
