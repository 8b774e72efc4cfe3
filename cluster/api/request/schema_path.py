"""Finds the part of a JSON schema that causes an error, by trying its parts. Knows nothing of llguidance or HTTP."""

from collections.abc import Callable, Iterator
from typing import Any

_NAMED = ("$defs", "definitions", "properties", "patternProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_SINGLE = ("items", "additionalProperties")
_MAX_TRIES = 500

SchemaPath = tuple[str | int, ...]


def find_error_path(
    schema: dict[str, Any], message: str, error_of: Callable[[Any], str]
) -> SchemaPath:
    """Return the path of the innermost part of `schema` that by itself has the error `message`; () for the whole.

    error_of returns the error of a schema, "" for none. At most 500 parts are tried.
    """
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path: SchemaPath = ()
    tries = 0
    parts = _parts(schema)
    while (step := next(parts, None)) is not None:
        tries += 1
        if tries > _MAX_TRIES:
            break
        step_path, part = step
        if error_of({**shared, **part}) == message:
            path += step_path
            parts = _parts(part)
    return path


def _parts(schema: dict[str, Any]) -> Iterator[tuple[SchemaPath, dict[str, Any]]]:
    """Yield the parts of a schema; definitions first, because a broken one breaks each schema that refers to it."""
    for keyword in _NAMED:
        named = schema.get(keyword)
        if isinstance(named, dict):
            yield from (((keyword, name), part) for name, part in named.items() if _is(part))
    for keyword in _SINGLE:
        if _is(schema.get(keyword)):
            yield (keyword,), schema[keyword]
    for keyword in _LISTS:
        listed = schema.get(keyword)
        if isinstance(listed, list):
            yield from (((keyword, i), part) for i, part in enumerate(listed) if _is(part))


def _is(part: Any) -> bool:
    return isinstance(part, dict)
