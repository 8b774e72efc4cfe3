"""Turns all problems of a configuration into one error with a line per problem.

Reads pydantic's error records and JSON schema. Knows nothing of YAML text and of the meaning of keys.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

JsonSchema = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """One problem. `message` follows the key; without a key it is about the file.

    involves: the other keys that the problem depends on. If one of them is wrong itself, the problem is dropped.
    """

    key: str
    message: str
    involves: tuple[str, ...] = ()


class ConfigError(ValueError):
    """A configuration that cannot be used; the message has a line for each of `problems`."""

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()):
        super().__init__(message, problems)  # all arguments, or it would not survive pickling
        self.problems = problems

    def __str__(self) -> str:
        return str(self.args[0])

    @classmethod
    def of(
        cls, source: str, problems: Sequence[Problem], places: Mapping[str, str] | None = None
    ) -> "ConfigError":
        """The error of `problems`; `places` has the place of each key, such as "line 7"."""
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{source}: {count}"]
        for problem in problems:
            place = (places or {}).get(problem.key)
            where = f" ({place})" if place else ""
            key = f"{problem.key}: " if problem.key else ""
            lines.append(f"  {key}{problem.message}{where}")
        return cls("\n".join(lines), tuple(problems))


def show(value: Any) -> str:
    """A value in YAML's flow form, at most 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def from_pydantic(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """One problem per key, with the reasons of all arms of a union."""
    schema = model.model_json_schema()
    known = dict(leaf_schemas(schema))
    found: dict[str, str] = {}
    for record in error.errors():
        (key, section), value = _locate(record["loc"], schema), show(record["input"])
        reason = record["msg"]
        if record["type"] == "extra_forbidden":
            of_section = dict(_leaves(section, schema, f"{key.rpartition('.')[0]}.".lstrip(".")))
            found[key] = f"unknown key (value {value}); {_nearest(key, known | of_section)}"
        elif record["type"] == "missing":
            found[key] = "is missing"
        elif key not in found:
            found[key] = f"{value} is not allowed: {reason}"
        else:
            found[key] += f"; or: {reason}"
    return [Problem(key, message) for key, message in found.items()]


def leaf_schemas(schema: JsonSchema, prefix: str = "") -> Iterator[tuple[str, JsonSchema]]:
    """(dotted key, JSON schema) of every setting; follows references to sections."""
    return _leaves(schema, schema, prefix)


def _leaves(node: JsonSchema, root: JsonSchema, prefix: str) -> Iterator[tuple[str, JsonSchema]]:
    for name, child in node["properties"].items():
        child = _follow(child, root)
        if "properties" in child:
            yield from _leaves(child, root, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _follow(schema: JsonSchema, root: JsonSchema) -> JsonSchema:
    if "$ref" in schema:
        definition: JsonSchema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        return definition
    return schema


def _locate(loc: tuple[int | str, ...], root: JsonSchema) -> tuple[str, JsonSchema]:
    """The dotted key of a pydantic location, without union arms, and the schema of the last section on its way."""
    parts: list[str] = []
    node = section = root
    for part in loc:
        if "properties" in node:
            child = node["properties"].get(str(part), {})
        elif isinstance(part, int) and "properties" in _follow(node.get("items", {}), root):
            child = node["items"]
        else:
            break
        parts.append(str(part))
        node = _follow(child, root)
        section = node if "properties" in node else section
    return ".".join(parts), section


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    """A hint at the most similar setting, in the same section or in another one."""
    section, _, name = key.rpartition(".")
    siblings = [other for other in known if other.rpartition(".")[0] == section]
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    sections = sorted({other.partition(".")[0] for other in known})
    if same_name:
        return f"did you mean {' or '.join(same_name)}?"
    # A wrong section (`schedular.max_num_seqs`) resembles the full key more than any sibling.
    if not section:
        close = difflib.get_close_matches(name, sections, n=1)
        if close:
            return f"did you mean {close[0]}?"
        close_names = _close_names(name, list(known))
        if close_names:
            return f"did you mean {close_names[0]}?"
        return f"the sections are {', '.join(sections)}"
    if close_names := _close_names(name, siblings):
        return f"did you mean {close_names[0]}?"
    here = f"{section} has {', '.join(other.rpartition('.')[2] for other in siblings)}"
    if close_names := _close_names(name, list(known)):
        return f"{here}; or did you mean {close_names[0]}?"
    return here


def _close_names(name: str, keys: list[str]) -> list[str]:
    """Return the key with the last part that resembles `name` most, if one does."""
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    return [by_name[match] for match in difflib.get_close_matches(name, by_name, n=1)]
