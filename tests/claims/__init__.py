"""Sentences and table rows of README.md and docs/*.md with figures, each made from the file that has the figures.

A module holds the claims of some pages: a function for each page, which yields the texts. A figure in a page without a
claim is an error of tests/unit/test_figures.py.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
Claims = Callable[[], Iterator[str]]


def load(name: str) -> Any:
    """The results of this name."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def row(*cells: object) -> str:
    """A row of a table."""
    return " ".join(f"| {' | '.join(map(str, cells))} |".split())


class Experiment:
    """The runs of one experiment. Settings are named by the last part of their keys."""

    def __init__(self, name: str):
        lines = (RESULTS / "experiments" / name / "results.jsonl").read_text().splitlines()
        self.runs = [json.loads(line) for line in lines]
        self.hardware = self.runs[0]["hardware"]

    def values(self, metric: str, **settings: object) -> list[float]:
        """The metric of each repeat of the only cell with these settings, in the order of the repeats."""
        found = [run for run in self.runs if settings.items() <= _short(run).items()]
        assert len({run["cell"] for run in found}) == 1, (metric, settings)
        return [run["metrics"][metric] for run in sorted(found, key=lambda run: run["repeat"])]

    def median(self, metric: str, **settings: object) -> float:
        """The median of the repeats."""
        return median(self.values(metric, **settings))

    def ratio(self, metric: str, baseline: dict[str, object], **settings: object) -> float:
        """The median of the ratios to the baseline, which are taken repeat by repeat."""
        pairs = zip(
            self.values(metric, **settings),
            self.values(metric, **settings | baseline),
            strict=True,
        )
        return median(value / base for value, base in pairs)


def _short(run: dict[str, Any]) -> dict[str, Any]:
    return {key.rpartition(".")[2]: value for key, value in run["settings"].items()}
