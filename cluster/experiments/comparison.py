"""Medians, spreads and ratios to a baseline of the cells of a folder. Pure arithmetic on its lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cluster.experiments.experiment import equals
from cluster.experiments.metrics import DEFAULTS

Line = Mapping[str, Any]
ORIGIN = ("hardware", "versions", "commit")


@dataclass(frozen=True)
class Spread:
    """The median, lowest and highest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Compute it; `values` must not be empty."""
        return cls(median(values), min(values), max(values))


@dataclass
class CellResult:
    """All runs of one cell. `runs`: repeat -> metrics; `errors`: repeat -> reason.

    request_errors   of runs with results: repeat -> reason -> number of requests
    """

    index: int
    name: str
    settings: dict[str, Any]
    runs: dict[int, Mapping[str, float]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    request_errors: dict[int, Mapping[str, int]] = field(default_factory=dict)

    def spread(self, metric: str) -> Spread | None:
        """Return the spread over the repeats; None without a value."""
        values = [run[metric] for run in self.runs.values() if metric in run]
        return Spread.of(values) if values else None


@dataclass(frozen=True)
class Results:
    """A folder of results as data. `head`: experiment.json; `origins`: a line of each origin, and its runs.

    busy   share of the cores that other processes used before the starts, by start
    """

    head: Line
    cells: list[CellResult]
    origins: list[tuple[Line, int]]
    busy: list[float]

    @classmethod
    def of(cls, head: Line, lines: Sequence[Line]) -> "Results":
        """Sort the lines by cell; cells without a line are empty."""
        cells = {
            cell["index"]: CellResult(cell["index"], cell["name"], cell["settings"])
            for cell in head["cells"]
        }
        origins: dict[str, list[Line]] = {}
        busy: dict[str, float] = {}
        for line in lines:
            cell = cells.get(line["cell"])
            if cell is None:
                continue
            if line["error"] is not None:
                cell.errors[line["repeat"]] = line["error"]
                continue
            cell.runs[line["repeat"]] = line["metrics"]
            if line.get("request_errors"):
                cell.request_errors[line["repeat"]] = line["request_errors"]
            engine = line.get("engine", {})
            if engine.get("busy_before_start") is not None:
                busy[engine["folder"]] = engine["busy_before_start"]
            same = json.dumps([line.get(part) for part in ORIGIN], sort_keys=True)
            origins.setdefault(same, []).append(line)
        counted = [(own[0], len(own)) for own in origins.values()]
        return cls(head, list(cells.values()), counted, list(busy.values()))

    @property
    def axes(self) -> list[str]:
        """The swept keys."""
        return list(self.head["axes"])

    @property
    def metrics(self) -> list[str]:
        """The metrics of tables and plots that at least one cell has."""
        wanted = self.head["report"]["metrics"] or DEFAULTS[self.head["kind"]]
        return [name for name in wanted if any(cell.spread(name) for cell in self.cells)]

    def missing_metrics(self) -> list[str]:
        """Return the metrics that the file names and no run has."""
        wanted = self.head["report"]["metrics"]
        ran = any(cell.runs for cell in self.cells)
        return [name for name in wanted if ran and name not in self.metrics]

    def baseline(self, cell: CellResult) -> CellResult | None:
        """Return the cell that `cell` is compared with; None without a baseline, and for the baseline itself."""
        wanted = self.head["report"]["baseline"]
        if not wanted:
            return None
        rest = set(self.axes) - set(wanted)
        for other in filter(self.is_base, self.cells):
            if all(other.settings.get(key) == cell.settings.get(key) for key in rest):
                return None if other is cell else other
        return None

    def is_base(self, cell: CellResult) -> bool:
        """Whether a cell has the values of the baseline."""
        wanted = self.head["report"]["baseline"]
        return all(equals(cell.settings.get(key), value) for key, value in wanted.items())

    def ratio(self, cell: CellResult, metric: str) -> Spread | None:
        """Return a cell's metric over that of its baseline, repeat by repeat; None where there is none."""
        base = self.baseline(cell)
        return None if base is None else ratio(cell, base, metric)


def ratio(cell: CellResult, base: CellResult, metric: str) -> Spread | None:
    """Return the ratios of two cells, each repeat with the repeat of the same number, which ran beside it."""
    ratios = []
    for repeat, run in cell.runs.items():
        against = base.runs.get(repeat, {}).get(metric)
        if metric in run and against:
            ratios.append(run[metric] / against)
    return Spread.of(ratios) if ratios else None
