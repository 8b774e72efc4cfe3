"""Writes what a group of processes measured of several states in turns: `few` and `expert_cost`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.processes import Outcome
from scripts.bench.results import Found, Page, origin, save, write
from workers.config import RankConfig


def write_turns(
    options: argparse.Namespace,
    config: RankConfig,
    outcome: Outcome,
    page: Page,
    *,
    method: str | None,
    name: str,
    rows_of: Callable[[list[Any]], list[Found]],
) -> None:
    """Write OUT.json and OUT.md of what was reported until something failed.

    name      of the results of `rows_of` in OUT.json, which takes the reports that have a state

    Raises SystemExit where something failed.
    """
    turns = [report for report in outcome.reports if "state" in report]
    if turns:
        (start,) = (report["start"] for report in outcome.reports if "start" in report)
        found = {
            **origin(config.num_ranks if config.device == "cuda" else 0, options.commit),
            "method": method,
            "model": Path(config.model.path).name,
            "ranks": config.num_ranks,
            **start,
            name: rows_of(turns),
        }
        save(options.out, found)
        write(options.out, found, page)
        print(options.out.with_suffix(".md").read_text())
    if outcome.failure is not None:
        raise SystemExit(outcome.said())
