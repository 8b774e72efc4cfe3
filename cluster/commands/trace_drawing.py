"""Draws the spans that `phalanx trace` recorded: a PNG, and a JSON file for ui.perfetto.dev."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.trace.spans import AllToAllSpan, ComputeSpan, RankTrace, StepTrace

FORMS = ("plain", "ubatched")
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")
WAITING, COVERED, ALONE, STANDING = "tab:red", "tab:green", "lightsteelblue", "lightgrey"
LAYERS = 3
LEGIBLE = 0.05  # share of the width that a bar needs to bear its name


def check_matplotlib() -> None:
    """Raise ValueError if matplotlib is missing; call it before the ranks start."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from None


def perfetto(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return Chrome's trace format: a process for each rank and form, two threads for each ubatch."""
    events: list[dict[str, Any]] = []
    for trace in traces:
        for index, form in enumerate(FORMS):
            process = 2 * trace.rank + index
            name = f"rank {trace.rank}, {form}, {trace.num_tokens} tokens"
            events.append(_name(process, 0, "process_name", name))
            lanes = _lanes(getattr(trace, form))
            for thread, (lane, spans) in enumerate(lanes.items()):
                events.append(_name(process, thread, "thread_name", lane))
                events += [_span(process, thread, *span) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(traces: Sequence[RankTrace], path: Path, title: str, num_layers: int = LAYERS) -> None:
    """Write a PNG: `num_layers` layers from the middle of the slowest rank's steps, and a bar for each step."""
    from matplotlib.figure import Figure

    slowest = max(traces, key=lambda trace: trace.ubatched.seconds)
    num_layers = min(num_layers, slowest.plain.num_layers())
    heights = [3.2, 3.6, 0.8 + 0.45 * len(traces)]
    figure = Figure(figsize=(15, 1.5 + sum(heights)), layout="constrained")
    rows = figure.subplots(3, 1, gridspec_kw={"height_ratios": heights})
    first = (slowest.plain.num_layers() - num_layers) // 2
    windows = [getattr(slowest, form).interval_of(first, num_layers) for form in FORMS]
    width = max(end - begin for begin, end in windows)
    for axis, form, (begin, end) in zip(rows, FORMS, windows, strict=False):
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


def _draw_window(axis: Any, step: StepTrace, begin: float, width: float) -> None:
    """Draw a lane for each ubatch's compute, with its waits, and one for its all-to-alls."""
    num_ubatches = 1 + max(span.ubatch for span in step.all2alls)

    def bar(lane: int, start: float, end: float, text: str, **style: Any) -> None:
        start, end = max(start, begin), min(end, begin + width)
        if end <= start:
            return
        style = {"height": 0.8, "edgecolor": "white", "linewidth": 0.5, **style}
        axis.barh(-lane, 1e6 * (end - start), left=1e6 * (start - begin), **style)
        if end - start > LEGIBLE * width:
            middle = 1e6 * ((start + end) / 2 - begin)
            axis.text(middle, -lane, text, ha="center", va="center", fontsize=8, clip_on=True)

    for compute in step.computes:
        alpha = 0.55 if compute.name == "attention" else 0.9
        text = f"{compute.name} {compute.ubatch}" if compute.name != "end" else ""
        bar(compute.ubatch, compute.begin, compute.end, text, color=_colour(compute), alpha=alpha)
    for span in step.all2alls:
        for start, end in span.waits:
            bar(span.ubatch, start, end, "waits", color=STANDING, hatch="//")
        alpha = 0.4 if span.operation == "dispatch" else 0.7
        lane = num_ubatches + span.ubatch
        bar(lane, span.called, span.end, span.operation, color=_colour(span), alpha=alpha)
    names = [f"{what} {index}" for what in ("compute", "exchange") for index in range(num_ubatches)]
    axis.set_yticks([-lane for lane in range(len(names))], names)
    axis.set_xlim(0, 1e6 * width)
    axis.grid(axis="x", alpha=0.4)
    axis.set_axisbelow(True)


def _draw_summary(axis: Any, traces: Sequence[RankTrace]) -> None:
    """Draw a bar for each rank and form: compute alone, beside an all-to-all, waiting; a line: the unrecorded step."""
    labels: list[str] = []
    for trace in traces:
        for form, unrecorded in zip(FORMS, trace.unrecorded, strict=True):
            step, lane = getattr(trace, form), -len(labels)
            alone = step.seconds - step.exposed - step.covered
            left = 0.0
            for seconds, colour in (
                (alone, ALONE),
                (step.covered, COVERED),
                (step.exposed, WAITING),
            ):
                axis.barh(lane, 1e3 * seconds, left=left, color=colour, height=0.8)
                left += 1e3 * seconds
            axis.plot([1e3 * unrecorded] * 2, [lane - 0.4, lane + 0.4], color="black", lw=2)
            labels.append(f"rank {trace.rank} {form}")
    axis.set_yticks([-lane for lane in range(len(labels))], labels, fontsize=8)
    axis.set_xlabel("ms of the whole step")
    axis.set_title(
        "compute alone (blue), beside an all-to-all (green), waiting for one (red); black: the step without recording",
        loc="left",
    )
    axis.set_xlim(left=0)


def _colour(part: ComputeSpan | AllToAllSpan) -> str:
    return COLOURS[part.ubatch % len(COLOURS)]


def _lanes(step: StepTrace) -> dict[str, list[tuple[str, float, float]]]:
    """Return (name, begin, end) in seconds of each thread's spans; no two spans of a thread overlap."""
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for compute in step.computes:
        lane = lanes.setdefault(f"ubatch {compute.ubatch}", [])
        lane.append((compute.name, compute.begin, compute.end))
    for span in step.all2alls:
        lane = lanes.setdefault(f"ubatch {span.ubatch}", [])
        lane += [(f"waits for {span.operation}", *wait) for wait in span.waits]
        lane = lanes.setdefault(f"all-to-alls of ubatch {span.ubatch}", [])
        lane.append((span.operation, span.called, span.end))
    return lanes


def _name(process: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _span(process: int, thread: int, name: str, begin: float, end: float) -> dict[str, Any]:
    times = {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **times}


def write(
    traces: Sequence[RankTrace], prefix: Path, title: str, num_layers: int = LAYERS
) -> list[Path]:
    """Write `prefix`.json and `prefix`.png; return both paths."""
    json_path, png_path = (prefix.with_name(f"{prefix.name}.{end}") for end in ("json", "png"))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(perfetto(traces)))
    draw(traces, png_path, title, num_layers)
    return [json_path, png_path]
