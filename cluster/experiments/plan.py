"""The order of the runs of an experiment, and its printed form. Pure; starts nothing."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from cluster.experiments.cells import Cell, Engine, label
from cluster.experiments.experiment import Experiment

MAX_SHOWN = 40  # cells in the printed plan
RunKey = tuple[int, int]  # cell index, repeat


@dataclass(frozen=True)
class Run:
    """One repeat of one cell; repeats count from 1."""

    cell: Cell
    repeat: int

    @property
    def key(self) -> RunKey:
        """The run in files."""
        return self.cell.index, self.repeat

    @property
    def folder(self) -> str:
        """The name of the folder of its results."""
        return f"{self.cell.index:03d}-r{self.repeat}"


def ordered_runs(experiment: Experiment) -> list[Run]:
    """Return all runs in their order. Runs that share an engine are neighbours as far as the order allows."""
    sections, cells = experiment.sections, experiment.cells
    repeats = range(1, sections.repeats + 1)
    groups = _by_engine(cells)
    if sections.order == "paired":
        return [Run(cell, repeat) for repeat in repeats for group in groups for cell in group]
    if sections.order == "grid":
        return [Run(cell, repeat) for group in groups for cell in group for repeat in repeats]
    source = random.Random(f"{sections.seed}/order")
    source.shuffle(groups)
    starts = list(dict.fromkeys(group[0].process for group in groups))
    groups.sort(key=lambda group: starts.index(group[0].process))
    found = []
    for group in groups:
        runs = [Run(cell, repeat) for cell in group for repeat in repeats]
        source.shuffle(runs)
        found += runs
    return found


def _by_engine(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Return the cells of each engine; engines that share a start are neighbours."""
    groups: dict[Engine, dict[Engine, list[Cell]]] = {}
    for cell in cells:
        groups.setdefault(cell.process, {}).setdefault(cell.engine, []).append(cell)
    return [cells for engines in groups.values() for cells in engines.values()]


def num_starts(runs: Sequence[Run]) -> int:
    """Return how often an engine is started for these runs."""
    return len(list(groupby(run.cell.process for run in runs)))


def num_changes(runs: Sequence[Run]) -> int:
    """Return how often a started engine changes its settings for these runs."""
    return len(list(groupby(run.cell.engine for run in runs))) - num_starts(runs)


def describe(experiment: Experiment, runs: Sequence[Run], done: Collection[RunKey]) -> list[str]:
    """Return the lines of the printed plan."""
    sections, cells = experiment.sections, experiment.cells
    engines = len({cell.engine for cell in cells})
    changes = f", {count} change(s) of its settings" if (count := num_changes(runs)) else ""
    left = [run for run in runs if run.key not in done]
    lines = [sections.title]
    if sections.question:
        lines.append(f"  question   {sections.question}")
    lines += [
        f"  kind       {sections.kind}",
        f"  cells      {len(cells)}, {engines} engine configuration(s)",
        f"  runs       {len(runs)}: {sections.repeats} of each cell, order {sections.order}, "
        f"{num_starts(runs)} start(s) of an engine{changes}",
    ]
    for key in experiment.axes:
        values = list(dict.fromkeys(_text(cell, key) for cell in cells))
        lines.append(f"  axis       {key}: {', '.join(values)}")
    lines.append("")
    shown = cells if len(cells) <= MAX_SHOWN else [*cells[: MAX_SHOWN - 2], *cells[-1:]]
    for cell in shown:
        if len(shown) < len(cells) and cell is cells[-1]:
            lines.append(f"    ... {len(cells) - len(shown)} more cells")
        lines.append(f"  {cell.index:4d}  {cell.name}")
    if done:
        lines += ["", f"  {len(runs) - len(left)} of {len(runs)} runs have results"]
    return lines


def duration(seconds: float) -> str:
    """Return a time for people: `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _text(cell: Cell, key: str) -> str:
    return label(cell.settings[key]) if key in cell.settings else "-"
