"""Draws the results of a folder as one PNG, with a panel for each metric; the axes choose the kind of plot.

A numeric axis is drawn along x, with a line for each combination of the other axes; without a numeric axis each cell
is a bar. Needs matplotlib, which only the `bench` extra installs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.experiments.cells import label
from cluster.experiments.comparison import CellResult, Results

MAX_PANELS = 6
LOG_FROM = 8.0  # largest over smallest value of an axis
MAX_LEGEND = 12
MAX_NAME = 44  # letters of a line or a bar: a longer name would leave no room for the figures
BAR_INCHES = 0.25
DOTS_PER_INCH = 120


def has_matplotlib() -> bool:
    """Whether plots can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(results: Results, path: Path) -> bool:
    """Write the plot; return whether there was anything to draw."""
    metrics = results.metrics[:MAX_PANELS]
    cells = [cell for cell in results.cells if cell.runs]
    if not metrics or not cells:
        return False
    from matplotlib.figure import Figure

    x_key = choose_x(results)
    columns = min(len(metrics), 2)
    rows = -(-len(metrics) // columns)
    height = 3.8 if x_key is not None else max(3.8, BAR_INCHES * len(cells))
    figure = Figure(figsize=(6.5 * columns, 0.8 + height * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for metric, panel in zip(metrics, panels.flat, strict=False):
        if x_key is None:
            _draw_bars(panel, results, cells, metric)
        else:
            _draw_lines(panel, results, cells, metric, x_key)
        panel.set_title(metric, fontsize=10)
        panel.grid(alpha=0.3)
    for panel in list(panels.flat)[len(metrics) :]:
        panel.set_visible(False)
    figure.suptitle(results.head["title"], fontsize=12)
    figure.savefig(path, dpi=DOTS_PER_INCH, format="png")
    return True


def choose_x(results: Results) -> str | None:
    """Return report.x, or else the numeric axis with the most values; None where no axis is numeric."""
    chosen: str | None = results.head["report"]["x"]
    if chosen is not None:
        return chosen
    numeric = [key for key in results.axes if _is_numeric(results, key)]
    return max(numeric, key=lambda key: len(_values(results.cells, key)), default=None)


def _is_numeric(results: Results, key: str) -> bool:
    values = _values(results.cells, key)
    return len(values) > 1 and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )


def _values(cells: Sequence[CellResult], key: str) -> list[Any]:
    found: list[Any] = []
    for cell in cells:
        value = cell.settings.get(key)
        if value not in found:
            found.append(value)
    return found


def _draw_lines(
    panel: Any, results: Results, cells: Sequence[CellResult], metric: str, x_key: str
) -> None:
    others = naming_axes(results, x_key)
    values = _values(results.cells, x_key)
    numeric = _is_numeric(results, x_key)
    lines: dict[str, list[tuple[float, CellResult]]] = {}
    for cell in cells:
        if x_key in cell.settings and cell.spread(metric) is not None:
            x = cell.settings[x_key] if numeric else values.index(cell.settings[x_key])
            lines.setdefault(series_name(results, cell, others), []).append((x, cell))
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        spreads = [cell.spread(metric) for _, cell in points]
        middle = [spread.median for spread in spreads if spread is not None]
        below = [spread.median - spread.low for spread in spreads if spread is not None]
        above = [spread.high - spread.median for spread in spreads if spread is not None]
        xs = [x for x, _ in points]
        panel.errorbar(xs, middle, yerr=[below, above], marker="o", ms=4, capsize=3, label=name)
    panel.set_xlabel(x_key)
    panel.set_ylim(bottom=0)
    if not numeric:
        panel.set_xticks(range(len(values)), [label(value) for value in values])
    elif min(values) > 0 and max(values) / min(values) >= LOG_FROM:
        panel.set_xscale("log", base=2)
        panel.set_xticks(values, [label(value) for value in values])
        panel.minorticks_off()
    if others and len(lines) <= MAX_LEGEND:
        panel.legend(fontsize=7)


def _draw_bars(panel: Any, results: Results, cells: Sequence[CellResult], metric: str) -> None:
    shown = [(cell, spread) for cell in cells if (spread := cell.spread(metric)) is not None]
    names = [series_name(results, cell, results.axes) or "all" for cell, _ in shown]
    middle = [spread.median for _, spread in shown]
    below = [spread.median - spread.low for _, spread in shown]
    above = [spread.high - spread.median for _, spread in shown]
    panel.barh(range(len(shown)), middle, xerr=[below, above], capsize=3)
    panel.set_yticks(range(len(shown)), names, fontsize=8)
    panel.invert_yaxis()


def naming_axes(results: Results, x_key: str) -> list[str]:
    """Return the axes that name lines: all but x, and but numbers that another of these axes determines."""
    kept = [x_key]
    for key in results.axes:
        if key == x_key:
            continue
        words = any(isinstance(value, str) for value in _values(results.cells, key))
        if words or not any(_determines(results.cells, other, key) for other in kept):
            kept.append(key)
    return kept[1:]


def _determines(cells: Sequence[CellResult], key: str, other: str) -> bool:
    """Whether cells that are equal in one axis are equal in the other, as values that are swept in pairs are."""
    pairs = {(repr(cell.settings.get(key)), repr(cell.settings.get(other))) for cell in cells}
    return len(pairs) == len({value for value, _ in pairs})


def series_name(results: Results, cell: CellResult, keys: Sequence[str]) -> str:
    """Return the values of some axes of a cell: `ranks=2, mode=on`; of a long name the begin and the cell's number."""
    names = results.head["names"]
    name = ", ".join(
        f"{names[key]}={label(cell.settings[key])}" for key in keys if key in cell.settings
    )
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}... (cell {cell.index})"
