"""Draws what `phalanx trace` recorded: a PNG for the eye, and Perfetto's JSON for a closer look (ui.perfetto.dev)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.trace.spans import AllToAllSpan, ComputeSpan, RankTrace, Schedule

FORMS = ("plain", "ubatched")
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")
WAITING, HIDDEN, ALONE, STANDING = "tab:red", "tab:green", "lightsteelblue", "lightgrey"
LAYERS = 3
LEGIBLE = 0.05  # of the width: a narrower bar has no room for its name


def check_matplotlib() -> None:
    """Before all the work, and not after it. Raises ValueError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install -e '.[bench]'") from None


def perfetto(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Chrome's trace format: a process for each rank and form, and two threads for each slice."""
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


def draw(traces: Sequence[RankTrace], path: Path, title: str, num_layers: int = LAYERS) -> None:
    """Write a PNG: `num_layers` from the middle of the slowest rank's steps, and a bar of each whole step."""
    from matplotlib.figure import Figure

    slowest = max(traces, key=lambda trace: trace.ubatched.seconds)
    num_layers = min(num_layers, slowest.plain.num_layers())
    heights = [3.2, 3.6, 0.8 + 0.45 * len(traces)]
    figure = Figure(figsize=(15, 1.5 + sum(heights)), layout="constrained")
    rows = figure.subplots(3, 1, gridspec_kw={"height_ratios": heights})
    first = (slowest.plain.num_layers() - num_layers) // 2
    spans = [getattr(slowest, form).span_of(first, num_layers) for form in FORMS]
    width = max(end - begin for begin, end in spans)
    for axis, form, (begin, end) in zip(rows, FORMS, spans, strict=False):
        _draw_window(axis, getattr(slowest, form), begin, width)
        axis.axvline(1e6 * (end - begin), color="black", ls="--", lw=1)
        axis.set_title(
            f"{form}: layers {first} to {first + num_layers - 1} of rank {slowest.rank}, "
            f"{1e6 * (end - begin):,.0f} us",
            loc="left",
        )
    rows[1].set_xlabel("us")
    _draw_summary(rows[2], traces)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _draw_window(axis: Any, schedule: Schedule, begin: float, width: float) -> None:
    """A lane for each slice's compute, with its waits, and one for its exchanges."""
    num_ubatches = 1 + max(exchange.slice for exchange in schedule.exchanges)

    def bar(lane: int, start: float, end: float, text: str, **style: Any) -> None:
        start, end = max(start, begin), min(end, begin + width)
        if end <= start:
            return
        style = {"height": 0.8, "edgecolor": "white", "linewidth": 0.5, **style}
        axis.barh(-lane, 1e6 * (end - start), left=1e6 * (start - begin), **style)
        if end - start > LEGIBLE * width:
            middle = 1e6 * ((start + end) / 2 - begin)
            axis.text(middle, -lane, text, ha="center", va="center", fontsize=8, clip_on=True)

    for compute in schedule.computes:
        alpha = 0.55 if compute.name == "attention" else 0.9
        text = f"{compute.name} {compute.slice}" if compute.name != "end" else ""
        bar(compute.slice, compute.begin, compute.end, text, color=_colour(compute), alpha=alpha)
    for exchange in schedule.exchanges:
        for start, end in exchange.waits:
            bar(exchange.slice, start, end, "waits", color=STANDING, hatch="//")
        alpha = 0.4 if exchange.operation == "dispatch" else 0.7
        lane, name = num_ubatches + exchange.slice, exchange.operation
        bar(lane, exchange.called, _done(exchange), name, color=_colour(exchange), alpha=alpha)
    names = [f"{what} {index}" for what in ("compute", "exchange") for index in range(num_ubatches)]
    axis.set_yticks([-lane for lane in range(len(names))], names)
    axis.set_xlim(0, 1e6 * width)
    axis.grid(axis="x", alpha=0.4)
    axis.set_axisbelow(True)


def _draw_summary(axis: Any, traces: Sequence[RankTrace]) -> None:
    """A bar of each rank and form: compute alone, compute beside an exchange, waiting; a mark where nothing records."""
    labels = []
    for trace in traces:
        for form, unrecorded in zip(FORMS, trace.unrecorded, strict=True):
            schedule, lane = getattr(trace, form), -len(labels)
            alone = schedule.seconds - schedule.exposed - schedule.hidden
            left = 0.0
            for seconds, colour in (
                (alone, ALONE),
                (schedule.hidden, HIDDEN),
                (schedule.exposed, WAITING),
            ):
                axis.barh(lane, 1e3 * seconds, left=left, color=colour, height=0.8)
                left += 1e3 * seconds
            axis.plot([1e3 * unrecorded] * 2, [lane - 0.4, lane + 0.4], color="black", lw=2)
            labels.append(f"rank {trace.rank} {form}")
    axis.set_yticks([-lane for lane in range(len(labels))], labels, fontsize=8)
    axis.set_xlabel("ms of the whole step")
    axis.set_title(
        "compute alone (blue), beside an exchange (green), waiting for one (red); black: the step without recording",
        loc="left",
    )
    axis.set_xlim(left=0)


def _colour(part: ComputeSpan | AllToAllSpan) -> str:
    return COLOURS[part.slice % len(COLOURS)]


def _done(exchange: AllToAllSpan) -> float:
    """The end of its rows' way, as far as it can be seen."""
    if exchange.done is None:
        return exchange.arrived
    return min(max(exchange.done, exchange.sent), exchange.arrived)


def _lanes(schedule: Schedule) -> dict[str, list[tuple[str, float, float]]]:
    """(name, begin, end) in seconds of each thread's spans; no two of a thread overlap."""
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for compute in schedule.computes:
        spans = lanes.setdefault(f"slice {compute.slice}", [])
        spans.append((compute.name, compute.begin, compute.end))
    for exchange in schedule.exchanges:
        spans = lanes.setdefault(f"slice {exchange.slice}", [])
        spans += [(f"waits for {exchange.operation}", *wait) for wait in exchange.waits]
        spans = lanes.setdefault(f"exchanges of slice {exchange.slice}", [])
        spans.append((exchange.operation, exchange.called, _done(exchange)))
    return lanes


def _name(process: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _span(process: int, thread: int, name: str, begin: float, end: float) -> dict[str, Any]:
    times = {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **times}


def write(
    traces: Sequence[RankTrace], prefix: Path, title: str, num_layers: int = LAYERS
) -> list[Path]:
    """Both files, `prefix` with .json and .png; which were written."""
    json_path, png_path = (prefix.with_name(f"{prefix.name}.{end}") for end in ("json", "png"))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(perfetto(traces)))
    draw(traces, png_path, title, num_layers)
    return [json_path, png_path]
