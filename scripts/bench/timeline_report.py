"""Tables and pictures of timeline.py: a step's parts against their floors, and what ran when."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.results import origin_line
from scripts.bench.step_work import LayerKind, StepPart

GAPS = "gaps"
# Waits for other ranks are inside these kernels.
EXCHANGES = (StepPart.DISPATCH, StepPart.COMBINE, StepPart.VOTES)
WAYS = {
    StepPart.ATTENTION: "reading K and V closer to the memory's speed: blocks that end together",
    StepPart.LINEAR_ATTENTION: "reading and writing each state once, at the memory's speed",
    StepPart.QK_NORM: "doing it where the projection's result is still in registers",
    StepPart.DENSE: "reading weights ahead of the rows they meet, and splitting skinny products over all SMs",
    StepPart.NORMS: "joining them to the product before or after",
    StepPart.ROUTING: "joining it to the norm or the router's product before it",
    StepPart.DISPATCH: "even work of the ranks, and exchanges behind another ubatch's compute",
    StepPart.EXPERT_ORDER: "placing rows while they arrive",
    StepPart.GROUPED: "reading the experts' weights without pause between tiles",
    StepPart.ACTIVATION: "joining it to the product before it",
    StepPart.COMBINE: "even work of the ranks, and exchanges behind another ubatch's compute",
    StepPart.SAMPLING: "reading the logits once",
    StepPart.COPIES: "leaving them out: logits stay in the dtype that they are computed in",
    StepPart.VOTES: "an exchange that leaves the device alone",
    StepPart.OTHER: "joining small kernels to their neighbours",
    GAPS: "fewer kernels, or kernels that start before the one before has ended",
}
COLOURS = dict(
    zip(
        StepPart,
        (
            *(
                "#1f77b4",
                "#aec7e8",
                "#17becf",
                "#2ca02c",
                "#98df8a",
                "#bcbd22",
                "#ff7f0e",
                "#8c564b",
            ),
            *("#d62728", "#f7b6d2", "#ffbb78", "#9467bd", "#7f7f7f", "#e377c2", "#c7c7c7"),
        ),
        strict=True,
    )
)
HOST_COLOURS = {
    "schedule": "#6baed6",
    "exchange": "#e377c2",
    "launch": "#74c476",
    "build": "#31a354",
    "plan": "#006d2c",
    "sample": "#9467bd",
    "wait": "#eeeeee",
    "commit": "#fd8d3c",
}
INNER = ("build", "plan", "sample")


def page(report: dict[str, Any], name: str) -> str:
    """All of the .md but its notes: a table for each state, and at last what is furthest from its floor."""
    assumed, num_ranks = report["assumed_hardware"], report["ranks"]
    chosen = ", ".join(f"{family} {kind}" for family, kind in report["backends"].items())
    lines = [
        "# Where the time of a step goes",
        "",
        f"{origin_line(report)} {num_ranks} rank(s).",
        f"Backends: {chosen}. Model {report['model']}, weights {report['weights']}, routing {report['routing']}; "
        "all ranks in step, no HTTP. Written by `python -m scripts.bench.timeline`.",
        f"Floors: {assumed['memory_bytes'] / 1e12:g} TB/s, {assumed['flops'] / 1e12:g} TFLOP/s, "
        f"{assumed['link_bytes'] / 1e9:g} GB/s of links. A part's floor is the longest of the three, reading and "
        "writing what it takes and leaves; the whole step's leaves that out, and everything overlaps. Backends of "
        "dispatch and combine also wait for other ranks.",
    ]
    for state in report["states"]:
        picture = picture_name(state, name)
        lines += ["", f"## {state['title']}", "", *_state(state, num_ranks), "", f"![]({picture})"]
    lines += ["", "## Furthest from the floor", ""]
    for state in report["states"]:
        lines += [f"{state['title']}:", "", *_furthest(state), ""]
    return "\n".join(lines)


def picture_name(state: dict[str, Any], name: str) -> str:
    """Of the file beside those of that name."""
    return f"{name}-{state['phase']}-{state['shape']['tokens']:.0f}.png"


def slowest_rank(state: dict[str, Any]) -> int:
    """The one with the most to do beside exchanges, in which the others wait for it."""

    def work(rank: int) -> float:
        parts = state["ranks"][rank]["device"]["parts"]
        return sum(found["ms"] for part, found in parts.items() if part not in EXCHANGES)

    return max(range(len(state["ranks"])), key=work)


def excesses(state: dict[str, Any]) -> list[tuple[str, float]]:
    """(part or gaps, ms of a step of rank 0 above its floor), largest first."""
    device = state["ranks"][0]["device"]
    found = {
        part: figures["ms"] - state["floors"][part]["floor_ms"]
        for part, figures in device["parts"].items()
    }
    found[GAPS] = device["gaps_ms"]
    return sorted(found.items(), key=lambda item: -item[1])


def _energy(ranks: Sequence[dict[str, Any]], tokens: float) -> list[str]:
    """Return a line on joules; none for CPUs and for reports from before they were counted."""
    joules = [rank.get("joules_a_step") for rank in ranks]
    if not all(joules):
        return []
    a_step = sum(joules) / len(joules)
    return [
        f"Energy (NVML): {a_step:.1f} J a step and GPU, {1e3 * a_step / tokens:.2f} mJ a token."
    ]


def _state(state: dict[str, Any], num_ranks: int) -> list[str]:
    ranks, slow = state["ranks"], slowest_rank(state)
    first, floor, shape = ranks[0], state["step_floor"], state["shape"]
    median = [rank["step_ms"] for rank in ranks]
    host = ", ".join(f"{name} {ms:.3f}" for name, ms in first["host_ms"].items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in first["kinds"].items())
    lines = [
        f"{shape['tokens']:,.0f} tokens a rank, each attending to {shape['context']:,.0f} on average: "
        f"**{max(median):.3f} ms** a step (median of {first['steps']}: {kinds}), floor {floor['floor_ms']:.3f} ms "
        f"({floor['floor_ms'] / max(median):.0%}); {first['device']['step_ms']:.3f} ms while profiled.",
        f"Host (ms a step, rank 0; forward and sample by the device's clock): {host}.",
        *_energy(ranks, shape["tokens"]),
        "",
        f"| ms a step, profiled | rank 0 | rank {slow}, the slowest | floor | of the floor | bound by | kernels |",
        "|---|---:|---:|---:|---:|---|---:|",
        *_rows(state, slow),
        "",
        "Longest gaps: " + _gaps(first["device"]["longest_gaps"]) + ".",
    ]
    if num_ranks > 1:
        lines.append(
            f"Least of any rank: {_least(ranks)}; the rest of these is waiting for others."
        )
        lines += ["", *_hidden(ranks)]
    return lines


def _hidden(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """The covered share. One form of a step cannot give the saved share."""
    found = [rank["device"].get("covered_share") for rank in ranks]
    shares = ", ".join("-" if share is None else f"{share:.0%}" for share in found)
    return [
        f"Communication {shares} covered (by rank): of the time of kernels and copies of all-to-alls, the share in "
        "which other kernels run. `scripts.bench.overlap`, which runs both forms, has the saved share.",
    ]


def _rows(state: dict[str, Any], slow: int) -> list[str]:
    mine, other = (state["ranks"][rank]["device"] for rank in (0, slow))
    nothing = {"ms": 0.0, "kernels": 0.0}
    rows = []
    for part in StepPart:
        here, there = (device["parts"].get(part, nothing) for device in (mine, other))
        if here["kernels"] or there["kernels"]:
            floor = state["floors"][part]
            share = f"{floor['floor_ms'] / here['ms']:.0%}" if here["ms"] else "-"
            rows.append(
                f"| {part} | {here['ms']:.3f} | {there['ms']:.3f} | {floor['floor_ms']:.3f} | {share} | "
                f"{floor['bound']} | {here['kernels']:.0f} |"
            )
    twice = [round(-device["overlap_ms"], 3) + 0.0 for device in (mine, other)]
    floors = sum(floor["floor_ms"] for floor in state["floors"].values())
    total = mine["step_ms"]
    kernels = sum(found["kernels"] for found in mine["parts"].values())
    return [
        *rows,
        f"| {GAPS} | {mine['gaps_ms']:.3f} | {other['gaps_ms']:.3f} | | | | {mine['num_gaps']:.0f} gaps |",
        f"| two at once | {twice[0]:.3f} | {twice[1]:.3f} | | | | |",
        f"| all | {total:.3f} | {other['step_ms']:.3f} | {floors:.3f} | {floors / total:.0%} | | {kernels:.0f} |",
        *kind_rows(state["floors"], mine, other),
    ]


def kind_rows(floors: dict[str, Any], mine: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return a row for each kind of layer that the step has: the sums of its parts, and of their floors."""
    rows, nothing = [], {"ms": 0.0, "kernels": 0.0}
    for kind in LayerKind:
        parts = [part for part in StepPart if part.kind == kind]
        here, there = ([of["parts"].get(part, nothing) for part in parts] for of in (mine, other))
        ms, kernels = (sum(found[name] for found in here) for name in ("ms", "kernels"))
        floor = sum(floors[part]["floor_ms"] for part in parts if part in floors)
        if kernels:
            rows.append(
                f"| of it {kind} | {ms:.3f} | {sum(found['ms'] for found in there):.3f} | {floor:.3f} | "
                f"{floor / ms:.0%} | | {kernels:.0f} |"
            )
    return rows


def _gaps(gaps: Sequence[dict[str, Any]]) -> str:
    told = [f"{g['us']:.0f} us between {g['after']} and {g['before']}" for g in gaps]
    return ", ".join(told) or "none"


def _least(ranks: Sequence[dict[str, Any]]) -> str:
    found = []
    for part in EXCHANGES:
        of_ranks = [rank["device"]["parts"].get(part, {"ms": 0.0})["ms"] for rank in ranks]
        if max(of_ranks):
            found.append(f"{part} {min(of_ranks):.3f}")
    return ", ".join(found) or "no exchange on the device"


def _furthest(state: dict[str, Any]) -> list[str]:
    step_ms = state["ranks"][0]["device"]["step_ms"]
    return [
        f"{place}. {part}: {ms:.3f} ms above its floor, {ms / step_ms:.1%} of the step. "
        f"What would close it: {WAYS[part]}."
        for place, (part, ms) in enumerate(excesses(state)[:3], 1)
    ]


def layer_bounds(drawing: dict[str, Any], num_layers: int) -> tuple[float, float]:
    """Begin and end in us of a layer in the middle: from its first norm to the next layer's.

    Layers are told apart by attention's norms, one in each layer of each ubatch; without any by the clock.
    """
    device = sorted(drawing["device"], key=lambda span: span[3])
    marks = [span for span in device if span[1] == StepPart.QK_NORM]
    ubatches, layer = len(marks) // num_layers, num_layers // 2
    if not ubatches or layer + 1 >= num_layers:
        return layer * drawing["us"] / num_layers, (layer + 1) * drawing["us"] / num_layers
    norms = [span for span in device if span[1] == StepPart.NORMS]

    def first_norm(index: int) -> float:
        mark = marks[index * ubatches]
        return max((n[3] for n in norms if n[2] == mark[2] and n[3] < mark[3]), default=mark[3])

    return first_norm(layer), first_norm(layer + 1)


def draw(report: dict[str, Any], out: Path) -> None:
    """A picture of each state."""
    for state in report["states"]:
        path = out.with_name(picture_name(state, out.stem))
        draw_state(state, report["num_layers"], path)


def draw_state(state: dict[str, Any], num_layers: int, path: Path) -> None:
    """A PNG: a layer above, the whole step of rank 0 and its host below."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawing = state["ranks"][0]["drawing"]
    streams = sorted({span[2] for span in drawing["device"]})
    figure = Figure(figsize=(16, 6 + 0.7 * len(streams)), layout="constrained")
    heights = [1.6 + 0.6 * len(streams), 1.6 + 0.5 * (len(streams) + 2)]
    layer, whole = figure.subplots(2, 1, height_ratios=heights)
    begin, end = layer_bounds(drawing, num_layers)
    near = [span for span in drawing["device"] if span[4] > begin and span[3] < end]
    _draw_device(
        layer, near, sorted({span[2] for span in near}), begin, 1.0, named_from=end - begin
    )
    layer.set(xlim=(0, end - begin), xlabel="us")
    layer.set_title(f"one layer: {end - begin:.1f} us on the device", loc="left")
    _draw_device(whole, drawing["device"], streams, 0.0, 1e3)
    _draw_host(whole, drawing["host"], len(streams))
    whole.axvspan(begin / 1e3, end / 1e3, color="black", alpha=0.15)
    whole.set(xlim=(0, drawing["us"] / 1e3), xlabel="ms")
    title = f"the step: {drawing['us'] / 1e3:.2f} ms (the layer above is shaded)"
    whole.set_title(title, loc="left")
    used = {span[1] for span in drawing["device"]}
    patches = [Patch(color=COLOURS[part], label=part) for part in StepPart if part in used]
    phases = {span[0] for span in drawing["host"]} - {"step"}
    patches += [
        Patch(color=HOST_COLOURS[p], label=f"host: {p}") for p in HOST_COLOURS if p in phases
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=8, fontsize=9)
    figure.suptitle(f"{state['title']}, rank 0 while profiled", fontsize=12)
    figure.savefig(path, dpi=110)


def _draw_device(
    axis: Any,
    spans: Sequence[Sequence[Any]],
    streams: Sequence[int],
    begin: float,
    unit: float,
    named_from: float | None = None,
) -> None:
    """Backends as bars, a row for each stream; with `named_from` those of 4 % of it or more bear a name."""
    rows = {stream: -place for place, stream in enumerate(streams)}
    for part in StepPart:
        bars = [span for span in spans if span[1] == part]
        for stream in streams:
            ranges = [((s[3] - begin) / unit, (s[4] - s[3]) / unit) for s in bars if s[2] == stream]
            if not ranges:  # an empty call costs matplotlib as much as a full one
                continue
            at = (rows[stream] - 0.4, 0.8)
            edge = "white" if named_from else "none"
            axis.broken_barh(ranges, at, facecolors=COLOURS[part], edgecolor=edge, linewidth=0.4)
    for _, part, stream, start, stop in spans if named_from else ():
        if stop - start >= 0.04 * named_from:
            text = f"{part}\n{stop - start:.1f} us"
            middle = ((start + stop) / 2 - begin) / unit
            label = axis.text(middle, rows[stream], text, ha="center", va="center", fontsize=8)
            label.set(clip_on=True, rotation=90 if stop - start < 0.12 * named_from else 0)
    axis.set_yticks(list(rows.values()), [f"stream {stream}" for stream in rows])


def _draw_host(axis: Any, spans: Sequence[Sequence[Any]], num_streams: int) -> None:
    """Two rows below the streams: the host's phases, and what the launch consists of."""
    rows = {False: -num_streams - 0.3, True: -num_streams - 1.2}
    for phase, colour in HOST_COLOURS.items():
        ranges = [(s[1] / 1e3, (s[2] - s[1]) / 1e3) for s in spans if s[0] == phase]
        at = (rows[phase in INNER] - 0.4, 0.8)
        axis.broken_barh(ranges, at, facecolors=colour, edgecolor="#555555", linewidth=0.3)
    ticks, labels = list(axis.get_yticks()), [text.get_text() for text in axis.get_yticklabels()]
    axis.set_yticks([*ticks, *rows.values()], [*labels, "host", "of the launch"])
