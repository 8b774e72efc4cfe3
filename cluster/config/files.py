"""Reads a YAML file or a mapping, and overrides, into plain dictionaries, with the place of each key.

Knows nothing of the keys that exist.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.config.errors import Problem, show

Overrides = Sequence[str] | Mapping[str, Any]
"""`key.path=value` texts of --set, or a mapping: its keys are paths with values, or sections with mappings."""
BY_OPTION, BY_ARGUMENT = "--set", "argument"  # places of overrides


@dataclass
class ConfigSource:
    """The data, the problems of the text, and each dotted key's place, such as "line 7"."""

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_config(origin: Path | Mapping[str, Any], overrides: Overrides) -> ConfigSource:
    """Read the file, or copy the mapping, and apply the overrides. Never raises: errors are in `problems`."""
    source = ConfigSource()
    if isinstance(origin, Path):
        _read_yaml(origin, source)
    else:
        source.data = _without_empty_sections(dict(origin))
    if isinstance(overrides, Mapping):
        for key, value in _leaves(overrides, ""):
            _set(source, key.split("."), value, BY_ARGUMENT)
    else:
        for override in overrides:
            _override(override, source)
    return source


def _read_yaml(path: Path, source: ConfigSource) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        source.problems.append(Problem("", "no such file; expected a YAML configuration"))
        return
    except (OSError, UnicodeDecodeError) as error:
        source.problems.append(Problem("", f"cannot be read: {error}"))
        return
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        source.problems.append(Problem("", f"not valid YAML: {_yaml_reason(error)}"))
        return
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode) or not isinstance(data, dict):
        source.problems.append(
            Problem("", f"holds {show(data)}; expected sections such as `model:` with keys in them")
        )
        return
    _note_places(root, "", source)
    source.data = _without_empty_sections(data)


def _yaml_reason(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or str(error)
    if mark is None:
        return reason
    return f"line {mark.line + 1}, column {mark.column + 1}: {reason}"


def _note_places(node: yaml.MappingNode, prefix: str, source: ConfigSource) -> None:
    """Note each key's line. A key that stands twice is a problem, because YAML would keep the last one."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = f"{prefix}{getattr(key_node, 'value', key_node)}"
        line = key_node.start_mark.line + 1
        if key in seen:
            source.problems.append(
                Problem(key, f"stands twice, in lines {seen[key]} and {line}; keep one of them")
            )
        else:
            seen[key] = line
            source.places[key] = f"line {line}"
        if isinstance(value_node, yaml.MappingNode):
            _note_places(value_node, f"{key}.", source)


def _without_empty_sections(data: dict[Any, Any]) -> dict[str, Any]:
    """Return the mapping with keys as text, without sections that are null because all their keys are comments."""
    return {key: value for key, value in _text_keys(data).items() if value is not None}


def _text_keys(data: Any) -> Any:
    if isinstance(data, Path):
        return str(data)
    if not isinstance(data, Mapping):
        return data
    return {str(key): _text_keys(value) for key, value in data.items()}


def _override(override: str, source: ConfigSource) -> None:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        source.problems.append(
            Problem("", f"--set {show(override)} is not of the form key.path=value")
        )
        return
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        source.places[".".join(parts)] = BY_OPTION
        source.problems.append(Problem(".".join(parts), f"not valid YAML: {_yaml_reason(error)}"))
        return
    _set(source, parts, value, BY_OPTION)


def _set(source: ConfigSource, parts: list[str], value: Any, place: str) -> None:
    key = ".".join(parts)
    source.places[key] = place
    put(source.data, key, value)


def put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested dictionaries; a value on the way that is no dictionary is replaced.

    A key of a dictionary may have dots itself, as the axes of an experiment do.
    """
    section, _, rest = key.partition(".")
    if not rest or key in data:
        data[key] = value
        return
    child = data.get(section)
    if not isinstance(child, dict):
        child = data[section] = {}
    put(child, rest, value)


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the key path and the value of each setting."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value) if isinstance(value, Path) else value
