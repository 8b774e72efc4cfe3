"""The types of JSON that the schema of an argument allows. Knows nothing of call formats.

Formats that write arguments without quotes need the types: 5 is a number or a text, and None is a text or null.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

_MAX_DEPTH = 32  # of references and alternatives in each other; what is deeper may be any value
ALL = frozenset({"string", "number", "boolean", "null", "object", "array"})


@dataclass(frozen=True, slots=True)
class ValueTypes:
    """What a value may be.

    types    names of JSON's types; integers are numbers
    strings  the only strings; None = any
    """

    types: frozenset[str] = ALL
    strings: tuple[str, ...] | None = None

    @property
    def is_text(self) -> bool:
        """Whether the value is a string, or maybe null: then it is written without quotes."""
        return "string" in self.types and self.types <= {"string", "null"}

    @property
    def texts(self) -> tuple[str, ...] | None:
        """All texts of a value that `is_text`; None = any text."""
        if self.strings is None:
            return None
        return (*self.strings, "null") if "null" in self.types else self.strings


ANY = ValueTypes()


def type_of(value: Any) -> str:
    """Return the name of the type of a value that json.loads returned."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def value_types(schema: Any, root: Mapping[str, Any]) -> ValueTypes:
    """Return what a schema allows; `root` is the schema that its references start from."""
    return _types(schema, root, {}, 0)


def _types(
    schema: Any, root: Mapping[str, Any], known: dict[str, ValueTypes], depth: int
) -> ValueTypes:
    """Return what a schema allows. `known` has the references so far: each is followed once, also one to itself."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return ANY
    found = []
    if isinstance(ref := schema.get("$ref"), str):
        if ref not in known:
            known[ref] = ANY
            known[ref] = _types(_referred(ref, root), root, known, depth + 1)
        found.append(known[ref])
    named = schema.get("type")
    if names := [name for name in (named if isinstance(named, list) else [named]) if name]:
        found.append(_named(names, schema.get("nullable") is True))
    if "const" in schema:
        found.append(_listed([schema["const"]]))
    if isinstance(listed := schema.get("enum"), list):
        found.append(_listed(listed))
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list) and choices:
            found.append(reduce(_either, (_types(it, root, known, depth + 1) for it in choices)))
    if isinstance(parts := schema.get("allOf"), list):
        found += [_types(part, root, known, depth + 1) for part in parts]
    return reduce(_both, found, ANY)


def _referred(ref: str, root: Mapping[str, Any]) -> Any:
    """Return the schema of a reference into `root`; None for others."""
    if not ref.startswith("#"):
        return None
    found: Any = root
    for part in ref[1:].strip("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) and key else found
    return found


def _named(names: list[Any], nullable: bool) -> ValueTypes:
    """Return the types of `type`; those of a name that JSON Schema lacks are unknown."""
    types = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    return ValueTypes(frozenset(types | {"null"} if nullable else types)) if types <= ALL else ANY


def _listed(values: list[Any]) -> ValueTypes:
    strings = tuple(value for value in values if isinstance(value, str))
    return ValueTypes(frozenset(map(type_of, values)), strings)


def _either(one: ValueTypes, other: ValueTypes) -> ValueTypes:
    """Return what at least one of two schemas allows."""
    lists = [it.strings for it in (one, other) if "string" in it.types]
    known = [it for it in lists if it is not None]
    strings = tuple(text for it in known for text in it) if len(known) == len(lists) else None
    return ValueTypes(one.types | other.types, strings)


def _both(one: ValueTypes, other: ValueTypes) -> ValueTypes:
    """Return what both of two schemas allow."""
    strings = one.strings if other.strings is None else other.strings
    if one.strings is not None and other.strings is not None:
        strings = tuple(text for text in one.strings if text in other.strings)
    return ValueTypes(one.types & other.types, strings)
