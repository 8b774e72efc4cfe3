"""Reads an experiment file: its sections and its checked cells, or one error with every problem and its line."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.config.errors import ConfigError, Problem, from_pydantic
from cluster.config.files import ConfigSource, read_config
from cluster.config.resolve import available_cores
from cluster.experiments import sweep
from cluster.experiments.cells import Cell, CellMaker, digest, place_of
from cluster.experiments.metrics import OF_DECODES, known_metrics
from cluster.experiments.sections import Sections, sections_of
from workers.models.registry import configured_model


@dataclass(frozen=True)
class Experiment:
    """A file that can run. `axes` has the swept keys, `names` their short names, `overrides` the texts of --set."""

    path: Path
    overrides: tuple[str, ...]
    sections: Sections
    cells: list[Cell]

    @property
    def axes(self) -> list[str]:
        """The swept keys."""
        return sweep.swept_keys([cell.settings for cell in self.cells])

    @property
    def names(self) -> dict[str, str]:
        """Swept key to the name that tables show."""
        return sweep.short_names(self.axes)

    @property
    def identity(self) -> str:
        """Hash of what the results depend on; a folder of results belongs to one identity.

        Title, report, order, limits and the number of repeats may change between two calls that share a folder.
        """
        sections = self.sections
        cells = [[cell.name, cell.digest] for cell in self.cells]
        return digest([sections.kind, sections.seed, sections.warmup, cells])

    def head(self) -> dict[str, Any]:
        """Return what `phalanx report` needs of the file, as plain data."""
        sections = self.sections
        common = sections.model_dump(mode="json")
        keys = ("title", "question", "kind", "order", "repeats", "seed", "warmup", "report")
        return {
            "identity": self.identity,
            "overrides": list(self.overrides),
            **{key: common[key] for key in keys},
            "model": _model_facts(self.cells[0]),
            "axes": self.axes,
            "names": self.names,
            "cells": [
                {"index": cell.index, "name": cell.name, "settings": cell.settings}
                for cell in self.cells
            ],
        }


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read a file and apply `key.path=value` overrides. Raises ConfigError with all problems."""
    path = Path(path)
    source = read_config(path, overrides)
    if source.problems and not source.data:
        raise ConfigError.of(str(path), source.problems, source.places)
    model = sections_of(source.data.get("kind"))
    try:
        sections = model.model_validate(source.data, strict=True)
    except ValidationError as error:
        problems = [*source.problems, *from_pydantic(error, model)]
        raise ConfigError.of(str(path), problems, source.places) from None
    problems = [*source.problems, *sweep.problems(sections.sweep)]
    axes = sections.sweep.grid or sections.sweep.paired or sections.sweep.cells
    if "sweep" in sections.model_fields_set and not axes:
        text = "has no axes; expected grid, paired or list, or no key `sweep` for a single cell"
        problems.append(Problem("sweep", text))
    cells: list[Cell] = []
    if not problems:
        maker = CellMaker(sections, path.absolute().parent)
        cells, problems = maker.make(), maker.problems
    if not problems:
        problems = _report_problems(sections, cells)
    if problems:
        raise ConfigError.of(str(path), problems, _places(source, problems))
    return Experiment(path, tuple(overrides), sections, cells)


def _model_facts(cell: Cell) -> dict[str, Any]:
    """Return facts for a model of the measured steps; `cores` None: no rank shares its device."""
    model = configured_model(cell.config.model)
    on_cpu = cell.config.cluster.device == "cpu"
    cores = available_cores() if on_cpu else None
    return {"layers": model.num_moe_layers, "top_k": model.top_k, "cores": cores}


def _places(source: ConfigSource, problems: Sequence[Problem]) -> dict[str, str]:
    found = {problem.key: place_of(problem, source.places) for problem in problems}
    return {key: place for key, place in found.items() if place is not None}


def _report_problems(sections: Sections, cells: Sequence[Cell]) -> list[Problem]:
    """A baseline, an axis or a metric of the report that no cell has."""
    keys = sweep.swept_keys([cell.settings for cell in cells])
    found = []
    for key, value in sections.report.baseline.items():
        place = f"report.baseline.{key}"
        values = [cell.settings.get(key) for cell in cells]
        if key not in keys:
            found.append(Problem(place, f"is not swept; the axes are {', '.join(keys) or 'none'}"))
        elif not any(equals(found_value, value) for found_value in values):
            found.append(Problem(place, f"no cell has {value}"))
    if sections.report.x is not None and sections.report.x not in keys:
        found.append(Problem("report.x", f"is not swept; the axes are {', '.join(keys) or 'none'}"))
    known = known_metrics(sections.kind)
    for metric in sections.report.metrics:
        if metric not in known:
            close = difflib.get_close_matches(metric, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"expected {', '.join(known)}"
            found.append(Problem("report.metrics", f"no run has {metric}; {hint}"))
        elif metric in OF_DECODES and all(cell.workload.phase != "decode" for cell in cells):
            text = f"no run has {metric}; it needs workload.phase: decode"
            found.append(Problem("report.metrics", text))
    return found


def equals(setting: object, given: object) -> bool:
    """Whether a resolved setting has a value of the file; YAML reads a bare `on` as a boolean."""
    words = {True: "on", False: "off"}
    return setting == given or (isinstance(given, bool) and setting == words[given])
