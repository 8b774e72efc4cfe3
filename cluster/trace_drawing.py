"""Draws what `phalanx trace` recorded: a PNG for the eye, and Perfetto's JSON for a closer look (ui.perfetto.dev)."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workers.schedule import RankTrace, Schedule

FORMS = ("plain", "microbatched")
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")
WAITING = "tab:red"


def check_matplotlib() -> None:
    """Before all the work, and not after it. Raises ValueError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install 'phalanx[bench]'") from None


def perfetto(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Chrome's trace format: a process for each rank and form, threads `compute`, `waiting` and one of each slice."""
    events: list[dict[str, Any]] = []
    for trace in traces:
        for index, form in enumerate(FORMS):
            process = 2 * trace.rank + index
            name = f"rank {trace.rank}, {form}, {trace.num_tokens} tokens"
            events.append(_name(process, 0, "process_name", name))
            schedule = getattr(trace, form)
            for thread, spans in enumerate(_lanes(schedule).items()):
                events.append(_name(process, thread, "thread_name", spans[0]))
                events += [_span(process, thread, *span) for span in spans[1]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(traces: Sequence[RankTrace], path: Path, title: str) -> None:
    """Write a PNG: a row for each rank and form, compute above, communication under way below, waiting in red."""
    from matplotlib.figure import Figure

    rows = [(trace, form) for trace in traces for form in FORMS]
    figure = Figure(figsize=(14, 1 + 1.3 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)
    for axis, (trace, form) in zip(axes[:, 0], rows, strict=True):
        _draw_row(axis, getattr(trace, form))
        axis.set_ylabel(f"rank {trace.rank}\n{form}", rotation=0, ha="right", va="center")
    axes[-1, 0].set_xlabel("ms")
    figure.suptitle(f"{title}\nabove: compute, below: exchanges under way (by slice); red: waiting")
    figure.savefig(path, dpi=130)


def _draw_row(axis: Any, schedule: Schedule) -> None:
    for compute in schedule.computes:
        colour = COLOURS[compute.slice % len(COLOURS)]
        axis.barh(1, 1e3 * (compute.end - compute.begin), left=1e3 * compute.begin, color=colour)
    for exchange in schedule.exchanges:
        colour = COLOURS[exchange.slice % len(COLOURS)]
        under_way = exchange.arrived - exchange.called
        axis.barh(0, 1e3 * under_way, left=1e3 * exchange.called, color=colour, alpha=0.4)
        for begin, end in _waits(exchange):
            axis.barh(1, 1e3 * (end - begin), left=1e3 * begin, color=WAITING)
    axis.set_yticks([])


def _lanes(schedule: Schedule) -> dict[str, list[tuple[str, float, float]]]:
    """(name, begin, end) in seconds of each thread's spans; no two of a thread overlap."""
    lanes: dict[str, list[tuple[str, float, float]]] = {
        "compute": [(f"{c.name} of slice {c.slice}", c.begin, c.end) for c in schedule.computes],
        "waiting": [
            (f"{x.operation} of slice {x.slice}", *wait)
            for x in schedule.exchanges
            for wait in _waits(x)
        ],
    }
    for exchange in schedule.exchanges:
        lane = lanes.setdefault(f"exchanges of slice {exchange.slice}", [])
        lane.append((exchange.operation, exchange.called, exchange.arrived))
    return lanes


def _waits(exchange: Any) -> Iterator[tuple[float, float]]:
    """When compute stood still for this exchange."""
    yield exchange.called, exchange.sent
    yield exchange.awaited, exchange.arrived


def _name(process: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _span(process: int, thread: int, name: str, begin: float, end: float) -> dict[str, Any]:
    times = {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **times}


def write(traces: Sequence[RankTrace], prefix: Path, title: str) -> list[Path]:
    """Both files, `prefix` with .json and .png; which were written."""
    json_path, png_path = (prefix.with_name(f"{prefix.name}.{end}") for end in ("json", "png"))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(perfetto(traces)))
    draw(traces, png_path, title)
    return [json_path, png_path]
