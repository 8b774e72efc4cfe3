"""Where in a JSON schema an error is, found by trying its parts. Knows nothing of llguidance or HTTP."""

from collections.abc import Callable, Iterator
from typing import Any

_NAMED = ("$defs", "definitions", "properties", "patternProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_SINGLE = ("items", "additionalProperties")
_MAX_TRIES = 500

Place = tuple[str | int, ...]


def find_place(schema: dict[str, Any], message: str, error_of: Callable[[Any], str]) -> Place:
    """The way to the innermost part of `schema` that by itself gives the same `message`; () for the whole.

    error_of tells what is wrong with a schema, "" when nothing is.
    """
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place: Place = ()
    tries = 0
    parts = _parts(schema)
    while (step := next(parts, None)) is not None:
        tries += 1
        if tries > _MAX_TRIES:
            break
        way, part = step
        if error_of({**shared, **part}) == message:
            place += way
            parts = _parts(part)
    return place


def _parts(schema: dict[str, Any]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The schemas directly within one, definitions first: what refers to a broken one is broken too."""
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
