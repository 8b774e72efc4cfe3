"""Writes the tables of a folder: results.csv and summary.md, and the comparison of several folders."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cluster.experiments.cells import label
from cluster.experiments.comparison import Results, Spread, ratio
from cluster.experiments.results_folder import disk_errors, read_head, read_lines

BUSY = 0.2  # share of the cores from which on the page names the work of other processes
SUMMARY, TABLE, PLOT = "summary.md", "results.csv", "plot.png"


def read_results(folder: Path) -> Results:
    """Return the results of a folder. Raises FolderError."""
    return Results.of(read_head(folder), read_lines(folder))


def write_report(folder: Path, plotted: bool) -> None:
    """Write results.csv and summary.md of a folder."""
    results = read_results(folder)
    with disk_errors(folder):
        (folder / TABLE).write_text(to_csv(results, read_lines(folder)), encoding="utf-8")
        (folder / SUMMARY).write_text(summary(results, plotted), encoding="utf-8")


def to_csv(results: Results, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each run: cell, repeat, swept keys, error, every metric."""
    metrics = sorted({name for line in lines for name in line["metrics"]})
    head = ["cell", "repeat", *results.axes, "error", "config_hash", "workload_hash", *metrics]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for line in lines:
        settings = [label(line["settings"].get(key, "")) for key in results.axes]
        hashes = [line["config_hash"], line.get("workload_hash") or ""]
        values = [line["metrics"].get(name, "") for name in metrics]
        row = [line["cell"], line["repeat"], *settings, line["error"] or "", *hashes, *values]
        writer.writerow(row)
    return text.getvalue()


def summary(results: Results, plotted: bool = False) -> str:
    """Return the page of a folder."""
    head = results.head
    parts = [
        f"# {head['title']}",
        head["question"],
        _about(results),
        _counts(results),
        _busy(results),
    ]
    if results.metrics:
        parts.append(_spread_table(results))
        parts.append(_ratio_table(results))
        parts.append(f"![{head['title']}]({PLOT})" if plotted else "")
    parts += [_failures(results), _failed_requests(results)]
    missing = results.missing_metrics()
    if missing:
        parts.append(f"No run has the metrics {', '.join(missing)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def compare_folders(folders: Sequence[Path]) -> str:
    """Return the page that compares folders: medians of equal cells, and ratios to the first folder."""
    all_results = [read_results(folder) for folder in folders]
    names = _folder_names(folders)
    first = all_results[0]
    parts = [f"# {first.head['title']}: {', '.join(names)}"]
    for name, results in zip(names, all_results, strict=True):
        parts.append(f"{name}: {_about(results)}")
    by_name = [{cell.name: cell for cell in results.cells} for results in all_results]
    shared = [cell for cell in first.cells if all(cell.name in cells for cells in by_name)]
    if not shared:
        return "\n\n".join([*parts, "The folders have no cell in common."]) + "\n"
    for metric in first.metrics:
        rows = []
        for cell in shared:
            others = [cells[cell.name] for cells in by_name]
            row = [cell.name, *(_show(other.spread(metric)) for other in others)]
            rows.append([*row, *(_show_ratio(ratio(other, cell, metric)) for other in others[1:])])
        heads = ["cell", *names, *(f"{name} / {names[0]}" for name in names[1:])]
        parts.append(f"## {metric}\n\n{markdown_table(heads, rows)}")
    left_out = len({name for cells in by_name for name in cells}) - len(shared)
    if left_out:
        parts.append(f"{left_out} cells are not in all folders and are left out.")
    return "\n\n".join(parts) + "\n"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, the first column to the left, figures to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float) -> str:
    """Return a figure with three or four digits that matter."""
    if value == 0 or 0.01 <= abs(value) < 10:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _about(results: Results) -> str:
    """Return hardware, versions and commit of the runs; a folder that was continued elsewhere has several."""
    if len(results.origins) < 2:
        found = [origin for origin, _ in results.origins]
        return _origin(found[0] if found else results.head["origin"])
    lines = [f"- {_origin(origin)} {count} runs." for origin, count in results.origins]
    return "\n".join(["The runs have different origins:", "", *lines])


def _origin(origin: Mapping[str, Any]) -> str:
    hardware, versions, commit = origin["hardware"], origin["versions"], origin["commit"]
    gpus = f", {len(hardware['gpus'])} x {hardware['gpus'][0]}" if hardware["gpus"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    if commit:
        changed = " with changes that are not committed" if commit.endswith("+") else ""
        packages += f"; commit {commit.rstrip('+')}{changed}"
    cores = f"{hardware['cpu']}, {hardware['cores']} cores{gpus}"
    return f"{cores}; {packages}; {origin['date'][:10]}."


def _counts(results: Results) -> str:
    good = sum(len(cell.runs) for cell in results.cells)
    failed = sum(len(cell.errors) for cell in results.cells)
    total = len(results.cells) * results.head["repeats"]
    text = f"{good} of {total} runs, kind {results.head['kind']}, order {results.head['order']}"
    return f"{text}; {failed} failed." if failed else f"{text}."


def _busy(results: Results) -> str:
    if max(results.busy, default=0.0) < BUSY:
        return ""
    middle, most = (100 * share for share in (median(results.busy), max(results.busy)))
    return (
        f"Other processes used {middle:.0f} % of this machine's cores (median of the starts, at most {most:.0f} %), "
        "so figures vary more than on an idle machine."
    )


def _spread_table(results: Results) -> str:
    names = results.head["names"]
    heads = [*(names[key] for key in results.axes), *results.metrics]
    rows = []
    for cell in results.cells:
        settings = [
            label(cell.settings[key]) if key in cell.settings else "-" for key in results.axes
        ]
        rows.append([*settings, *(_show(cell.spread(metric)) for metric in results.metrics)])
    if not results.axes:
        heads, rows = ["", *heads], [["all", *row] for row in rows]
    return f"Median (lowest to highest) of the repeats:\n\n{markdown_table(heads, rows)}"


def _ratio_table(results: Results) -> str:
    wanted = results.head["report"]["baseline"]
    if not wanted:
        return ""
    rows = []
    for cell in results.cells:
        ratios = [results.ratio(cell, metric) for metric in results.metrics]
        if any(ratios):
            rows.append([cell.name, *map(_show_ratio, ratios)])
    if not rows:
        return ""
    base = next(cell for cell in results.cells if results.is_base(cell))
    names = [f"{results.head['names'][key]}={label(base.settings[key])}" for key in wanted]
    text = (
        f"Ratio to the cell with {', '.join(names)}, repeat by repeat: median (lowest to highest):"
    )
    return f"{text}\n\n{markdown_table(['cell', *results.metrics], rows)}"


def _failures(results: Results) -> str:
    lines = [
        f"- {cell.name}, repeat {repeat}: {error.splitlines()[0]}"
        for cell in results.cells
        for repeat, error in cell.errors.items()
    ]
    return "\n".join(["Failed runs:", "", *lines]) if lines else ""


def _failed_requests(results: Results) -> str:
    lines = [
        f"- {cell.name}, repeat {repeat}: {count} x {reason}"
        for cell in results.cells
        for repeat, reasons in cell.request_errors.items()
        for reason, count in reasons.items()
    ]
    head = "Requests that failed in runs with results; the figures of these runs leave failed requests out:"
    return "\n".join([head, "", *lines]) if lines else ""


def _show(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    if spread.low == spread.high:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.low)} to {number(spread.high)})"


def _show_ratio(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    if spread.low == spread.high:
        return f"{spread.median:.3f}"
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


def _folder_names(folders: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or the whole path where last parts are equal."""
    names = [folder.absolute().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
