"""The curve of scripts/chaos --soak: a sample every 10 s, the bounds of its figures, a page with ten minutes a row."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from scripts.bench.chaos_resources import ROLES, SLACK, measure
from scripts.bench.results import markdown_table, origin_line

SAMPLE_S = 10.0
WINDOW_S = 600.0
ALL_ROLES = ROLES | {
    "controller": "ray::ServeController",
    "launcher": "cluster.cli serve",
    "raylet": "raylet/raylet ",
    "gcs": "gcs/gcs_server ",
    "agent": "ray::DashboardAgent",
    "dashboard": "dashboard/dashboard.py",
}
FIGURES = ("rss_mb", "threads", "files")
FILES, SEGMENTS = 16, 1
"""What files and segments may grow by: clients connect as they come, and a group that starts has a segment."""
Sample = dict[str, float]
Facts = Callable[[], Mapping[str, float]]
"""Returns figures of the traffic: totals by name; `in_flight` and `longest_wait_s` are those since the last call."""


class Curve:
    """Samples of a server and its traffic since the start of this object.

    thread_names   of each role, when it had most threads
    """

    def __init__(self, pid: int, app_name: str, facts: Facts):
        self._pid, self._app_name, self._facts = pid, app_name, facts
        self._started = time.monotonic()
        self.samples: list[Sample] = []
        self.thread_names: dict[str, dict[str, int]] = {}
        self._most = dict.fromkeys(ALL_ROLES, 0.0)

    async def follow(self, ended: asyncio.Event) -> None:
        """Take samples until `ended` is set."""
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), SAMPLE_S)
            if not ended.is_set():
                self.take()

    def take(self) -> None:
        """Take a sample."""
        self.samples.append(self._sample())
        print(_line(self.samples[-1]), flush=True)

    def _sample(self) -> Sample:
        found = {"at_s": round(time.monotonic() - self._started, 1), **self._facts()}
        figures = measure(self._pid, self._app_name, ALL_ROLES)
        found["segments"] = figures["host"]["segments"]
        for role in ALL_ROLES:
            for name in FIGURES:
                found[f"{role}_{name}"] = figures.get(role, {}).get(name, 0)
            if found[f"{role}_threads"] > self._most[role]:
                self._most[role] = found[f"{role}_threads"]
                self.thread_names[role] = figures[role]["thread_names"]
        return found


def _line(sample: Sample) -> str:
    shown = ("at_s", "in_flight", "answers", "failures", "failed", "longest_wait_s", "rank_rss_mb")
    return ", ".join(f"{name} {sample[name]:g}" for name in shown)


def broken_bounds(
    samples: Sequence[Sample], warm_up_s: float, grow_mb: Mapping[str, float]
) -> list[str]:
    """Return the figures that were larger after the warm-up than ever in it, by more than their bounds.

    grow_mb   the bound of the memory of each role
    """
    warm = [sample for sample in samples if sample["at_s"] <= warm_up_s]
    later = [sample for sample in samples if sample["at_s"] > warm_up_s]
    if not warm or not later:
        return [f"{len(warm)} samples in the warm-up and {len(later)} after it compare nothing"]
    bounds = {"segments": float(SEGMENTS)}
    for role in ALL_ROLES:
        bounds[f"{role}_rss_mb"] = grow_mb[role]
        bounds[f"{role}_threads"] = SLACK["threads"]
        bounds[f"{role}_files"] = FILES
    found = []
    for name, bound in bounds.items():
        before, most = (max(sample[name] for sample in part) for part in (warm, later))
        if most > before + bound:
            at = next(sample["at_s"] for sample in later if sample[name] == most)
            found.append(f"{name}: {before:g} -> {most:g} after {at:.0f} s, more than {bound:g}")
    return found


def windows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the figures of each ten minutes: sums of the traffic, median and maximum of each process figure."""
    found: list[dict[str, Any]] = []
    before: Mapping[str, float] = {"at_s": 0.0}
    parts = groupby(samples, lambda sample: int((sample["at_s"] - SAMPLE_S / 2) // WINDOW_S))
    for number, members in parts:
        part = list(members)
        last = part[-1]
        row: dict[str, Any] = {"minutes": [number * 10, round(last["at_s"] / 60)]}
        for name in ("answers", "failures", "failed", "different", "left"):
            row[name] = last[name] - before.get(name, 0)
        row["answers_per_s"] = round(row["answers"] / (last["at_s"] - before["at_s"]), 2)
        row["longest_wait_s"] = max(sample["longest_wait_s"] for sample in part)
        for name in ("segments", *(f"{role}_{figure}" for role in ALL_ROLES for figure in FIGURES)):
            values = [sample[name] for sample in part]
            row[name] = [median(values), max(values)]
        found.append(row)
        before = last
    return found


def as_columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the samples as rows of `columns`, which take a fifth of the place."""
    columns = list(samples[0]) if samples else []
    return {
        "columns": columns,
        "samples": [[sample[name] for name in columns] for sample in samples],
    }


def page(found: dict[str, Any], name: str) -> str:
    """Return the results as Markdown."""
    rows, failures = found["ten_minutes"], found["failures"]
    hours, ranks = found["seconds"] / 3600, found["ranks"]
    return (
        f"# {hours:.2g} hours of mixed traffic and failures\n\n"
        f"{ranks} ranks of the demo model on CPU, {found['streams']} clients, a failure every "
        f"{found['seconds_between']:g} s. {origin_line(found)} All figures: [{name}.json]({name}.json). Written by "
        "`scripts/chaos --soak`.\n\n"
        + _verdict(found)
        + "\n## Traffic\n\n"
        + markdown_table(
            ("minutes", "answers", "answers/s", "left", "failures", "failed", "longest wait"),
            (_traffic(row) for row in rows),
        )
        + "\nLeft: the client ended the connection early. Longest wait: without an item of an answer.\n"
        + "\n## Memory\n\nMB, median and maximum of the process with most:\n\n"
        + _table(rows, "rss_mb", ALL_ROLES)
        + "\n## Threads and files\n\nMedian and maximum of the process with most, threads:\n\n"
        + _table(rows, "threads", ROLES)
        + "\nFiles:\n\n"
        + _table(rows, "files", ROLES)
        + "\n## Pauses\n\nUntil every stream that was open has its next item:\n\n"
        + markdown_table(
            ("failure", "times", "median", "most"),
            (
                (kind, str(of["count"]), *(f"{of['pause_s'][x]:.1f} s" for x in ("median", "most")))
                for kind, of in failures.items()
            ),
        )
    )


def _verdict(found: dict[str, Any]) -> str:
    noise, resources = found["noise_without_failures"], found["resources"]
    lines = [
        f"{sum(found['answered'].values()):,} answers were compared with those of the undisturbed server; "
        f"{found['clients_left']:,} clients left early.",
        f"{len(found['failed'])} failed. {len(found['rounding'])} have another text that noise of the size of rounding "
        f"errors gives too ({noise['others']} of {noise['answers']} answers without failures).",
        f"{len(resources['grew'])} figures grew beyond their bounds after {resources['warm_up_s'] / 60:.2g} minutes.",
    ]
    return "".join(f"- {line}\n" for line in lines)


def _traffic(row: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (f"{row[name]:,.0f}" for name in ("left", "failures", "failed"))
    wait = f"{row['longest_wait_s']:.1f} s"
    return _minutes(row), f"{row['answers']:,.0f}", f"{row['answers_per_s']:.1f}", *counts, wait


def _table(rows: Sequence[Mapping[str, Any]], figure: str, roles: Iterable[str]) -> str:
    roles = list(roles)
    cells = (
        (_minutes(row), *("{:.0f}, {:.0f}".format(*row[f"{role}_{figure}"]) for role in roles))
        for row in rows
    )
    return markdown_table(("minutes", *roles), cells)


def _minutes(row: Mapping[str, Any]) -> str:
    first, last = row["minutes"]
    return f"{first} to {last}"
