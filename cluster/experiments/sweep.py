"""Expands the sweep of an experiment into the settings of its cells. Pure; knows nothing of the keys that exist."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from cluster.config.errors import Problem, show
from cluster.experiments.sections import Sweep

Settings = dict[str, Any]  # dotted key -> value


def expand(sweep: Sweep) -> list[Settings]:
    """Return the settings of each cell: every combination of the grid's axes, the pairs and the listed cells."""
    choices: list[list[Settings]] = []
    choices += [[{key: value} for value in values] for key, values in sweep.grid.items()]
    for group in sweep.paired:
        length = len(next(iter(group.values())))
        choices.append([{key: values[i] for key, values in group.items()} for i in range(length)])
    if sweep.cells:
        choices.append(list(sweep.cells))
    return [_merged(parts) for parts in product(*choices)]


def problems(sweep: Sweep) -> Iterator[Problem]:
    """Empty axes, pairs of unequal length, and keys that are swept twice."""
    seen: dict[str, str] = {}
    places = [(f"sweep.grid.{key}", key, values) for key, values in sweep.grid.items()]
    for index, group in enumerate(sweep.paired):
        yield from _pair_problems(index, group)
        places += [("sweep.paired", key, values) for key, values in group.items()]
    for place, key, values in places:
        if not values:
            yield Problem(place, f"{key} has no values; expected a list of at least one")
        if key in seen:
            yield Problem(place, f"{key} is swept twice, see {seen[key]}")
        seen[key] = place
        if place != "sweep.paired" and _repeats(values):
            yield Problem(place, f"{key} has a value twice: {show(values)}")
    for cell in sweep.cells:
        for key in cell:
            if key in seen:
                yield Problem("sweep.list", f"{key} is swept twice, see {seen[key]}")
    if _repeats(sweep.cells):
        yield Problem("sweep.list", "two cells are equal")
    if any(not cell for cell in sweep.cells):
        yield Problem("sweep.list", "a cell without keys; expected at least one `key: value`")


def swept_keys(cells: Sequence[Settings]) -> list[str]:
    """Return the keys that the cells set, in order of their first appearance."""
    return list(dict.fromkeys(key for cell in cells for key in cell))


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return for each key its shortest end that no other key has: `ranks` for `cluster.ranks`."""
    found = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            others = (other for other in keys if other != key)
            if not any(other == name or other.endswith(f".{name}") for other in others):
                break
        found[key] = name
    return found


def flat(settings: Mapping[str, Any], prefix: str = "") -> Settings:
    """Return nested settings with dotted keys."""
    found: Settings = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _merged(parts: Sequence[Settings]) -> Settings:
    return {key: value for part in parts for key, value in part.items()}


def _pair_problems(index: int, group: Mapping[str, list[Any]]) -> Iterator[Problem]:
    lengths = {key: len(values) for key, values in group.items()}
    if not group:
        yield Problem("sweep.paired", f"group {index + 1} has no keys")
    elif len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} has {count}" for key, count in lengths.items())
        yield Problem("sweep.paired", f"the values of a group go together, but {counts}")
    elif _repeats(list(zip(*group.values(), strict=True))):
        yield Problem("sweep.paired", f"group {index + 1} has equal values twice")


def _repeats(values: Sequence[Any]) -> bool:
    return len({json.dumps(value, default=str) for value in values}) < len(values)
