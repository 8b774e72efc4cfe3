"""The figures, the page and the plot of all2all.py; nothing here needs a GPU.

T tokens of a rank, K experts per token, r ranks.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from scripts.bench.results import devices, markdown_table, missing_lines, origin_line

STYLES = ("-", "--", ":")  # of a backend's variants
LINK = 380e9  # bytes/s out of one H200 to its peers over NVLink, measured


def useful_rows(topk_idx_TK: torch.Tensor, starts: Sequence[int], rank: int) -> int:
    """Rows that must leave `rank`: each token's once for every other rank that holds any of its experts.

    topk_idx_TK global ids, -1 = none; rank q holds experts starts[q] .. starts[q + 1] - 1.
    """
    return sum(
        int(((topk_idx_TK >= first) & (topk_idx_TK < end)).any(-1).sum())
        for owner, (first, end) in enumerate(pairwise(starts))
        if owner != rank
    )


def useful_bytes(num_rows: float, row_bytes: int, sum_bytes: int) -> int:
    """Bytes out of a rank in both directions: rows with their ids and weights, and sums of as many rows back."""
    return round(num_rows * (row_bytes + sum_bytes))


def hidden_share(gemm_us: float, exchange_us: float, both_us: float) -> float:
    """Share of an exchange that vanishes beside a product: 1 all of it, 0 none, less if both lose by it."""
    return round(min(1.0, (gemm_us + exchange_us - both_us) / exchange_us), 2)


def figures(times: dict[str, float], sent_bytes: int) -> dict[str, float]:
    """`times` of all2all.py with what follows from them."""
    found = dict(times)
    if times["us"]:
        found["gb_per_s"] = round(sent_bytes / times["us"] / 1e3, 1)
    found["hidden"] = hidden_share(times["gemm_us"], times["apart_us"], times["both_us"])
    return found


def add(found: dict[str, Any], reports: Iterable[dict[str, Any]]) -> None:
    """What a backend's processes reported, into the results."""
    for report in reports:
        size = str(report.get("tokens"))
        if "base" in report:
            found["tokens"][size] = report["base"]
        elif "about" in report:
            variant = report["variant"]
            found["backends"][variant["name"]] = variant | report["about"] | {"sizes": {}}
        elif "times" in report:
            entry = found["backends"][report["variant"]["name"]]
            rows = found["tokens"][size]["sent_rows"]
            sent_bytes = useful_bytes(rows, entry["row_bytes"], found["sum_bytes"])
            entry["sizes"][size] = figures(report["times"], sent_bytes)


def page(found: dict[str, Any], name: str) -> str:
    """All of the .md but its notes."""
    shape = found["shape"]
    missing = missing_lines(found["missing"])
    return f"""# Exchanges around the experts between GPUs

{origin_line(found)}
One MoE layer: hidden {shape["hidden"]}, {shape["experts"]} experts, top-{shape["top_k"]}, {shape["dtype"]}, uniform \
random routing, equally many tokens on each rank.

A cell is **us / GB/s / share hidden**. Time of dispatch and combine, routing and weighted sums included: the slowest
rank's median of {found["rounds"]} runs, each {found["in_graph"]} exchanges as one CUDA graph; backends marked * \
wait on the host and run eagerly.
GB/s: the bytes that must leave a rank (each row once to each rank that has an expert of it, a sum back) over that time.
Hidden: (experts alone + exchange alone - both at once) / exchange, where the exchange has a stream to itself beside
the experts (`{found["gemm"]}`, width {shape["width"]}) of the same number of tokens and all three take turns;
experts that are shorter than the exchange cannot hide all of it. Names with a number of SMs: the exchange has these,
the experts beside it all others; `symm` without takes what it likes, `deepep` 32.
The floor is the bytes over {found["link_bytes_per_s"] / 1e9:g} GB/s; `here` is routing and sums alone.
`copy_engine` is kernels alone and copies beside other work, `copies` always copies.

{tokens_table(found)}
{sms_table(found)}
![time and share hidden by tokens]({name}.png)

{chr(10).join(missing)}
"""


def tokens_table(found: dict[str, Any]) -> str:
    """Backends by tokens: us, GB/s, share hidden; the fastest in bold."""
    names = [name for name, backend in found["backends"].items() if not backend["sms_only"]]
    marks = {name: name + ("" if found["backends"][name]["graph"] else " *") for name in names}
    rows = []
    for tokens, base in found["tokens"].items():
        at = {name: found["backends"][name]["sizes"].get(tokens) for name in names}
        best = min((row["us"] for row in at.values() if row), default=None)
        cells = [_cell(row, best) for row in at.values()]
        rows.append([f"{int(tokens):,}", f"{base['floor_us']:g}", f"{base['here_us']:g}", *cells])
    return markdown_table(["tokens a rank", "floor", "here", *marks.values()], rows)


def _cell(row: dict[str, float] | None, best: float | None) -> str:
    if row is None:
        return "-"
    us = f"**{row['us']:g}**" if row["us"] == best else f"{row['us']:g}"
    return f"{us} / {row['gb_per_s']:g} / {100 * row['hidden']:.0f} %"


def sms_table(found: dict[str, Any]) -> str:
    """By SMs of an exchange at one size: it alone, experts on the others, both, and what that gains."""
    keys, rows = ("apart_us", "gemm_us", "rest_us", "both_us"), []
    size = str(found["sms_tokens"])
    there = [entry for entry in found["backends"].values() if size in entry["sizes"]]
    for entry in there:
        if entry["num_sms"] is None:
            continue
        row = entry["sizes"][size]
        alone = min(b["sizes"][size]["us"] for b in there if b["backend"] == entry["backend"])
        figures_us = (f"{row[key]:g}" if key in row else "-" for key in keys)
        gain = f"{(alone + row['gemm_us']) / row['both_us']:.2f}"
        hidden = f"{100 * row['hidden']:.0f} %"
        rows.append([entry["backend"], str(entry["num_sms"]), *figures_us, gain, hidden])
    if not rows:
        return ""
    head = ["backend", "SMs", "exchange", "experts, all SMs", "experts, other SMs", "both at once"]
    head += ["gain", "hidden"]
    caption = (
        f"SMs for the exchange of {found['sms_tokens']:,} tokens a rank, us; gain: the backend's "
        "fastest exchange and then the experts, over both at once:\n\n"
    )
    return caption + markdown_table(head, rows)


def plot(found: dict[str, Any], out: Path) -> None:
    """Time and GB/s over tokens, the share hidden, and the SMs' split; nothing where nothing was measured."""
    from matplotlib.figure import Figure

    if not any(backend["sizes"] for backend in found["backends"].values()):
        return
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    times, rates, hidden, split = figure.subplots(2, 2).flat
    styles: dict[str, int] = {}
    for name, entry in found["backends"].items():
        if entry["sms_only"] or not entry["sizes"]:
            continue
        styles[entry["backend"]] = nth = styles.get(entry["backend"], -1) + 1
        look = {"color": _color(found, entry["backend"]), "ls": STYLES[nth % len(STYLES)]}
        tokens = [int(size) for size in entry["sizes"]]
        for axes, key in ((times, "us"), (rates, "gb_per_s"), (hidden, "hidden")):
            values = [row[key] for row in entry["sizes"].values()]
            axes.plot(tokens, values, marker="o", ms=3, label=name, **look)
    lines = (("floor_us", "floor of the links", "k--"), ("here_us", "routing and sums", "k:"))
    for key, label, style in lines:
        values = [base[key] for base in found["tokens"].values()]
        times.plot([int(size) for size in found["tokens"]], values, style, lw=1, label=label)
    times.set(xscale="log", yscale="log", title="dispatch + combine, us", xlabel="tokens a rank")
    rates.set(xscale="log", title="useful GB/s out of a GPU", xlabel="tokens a rank")
    hidden.set(xscale="log", title="share hidden behind the experts", xlabel="tokens a rank")
    hidden.set_ylim(top=1.05)
    _plot_split(found, split)
    for axes in (times, rates, hidden, split):
        axes.grid(alpha=0.3)
    for axes in (times, split):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, ncols=2)
    shape = found["shape"]
    figure.suptitle(f"{devices(found)}, hidden {shape['hidden']}, {shape['experts']} experts")
    figure.savefig(out.with_suffix(".png"), dpi=110)


def _color(found: dict[str, Any], backend: str) -> str:
    """One of a backend's own."""
    names = sorted({entry["backend"] for entry in found["backends"].values()})
    return f"C{names.index(backend)}"


def _plot_split(found: dict[str, Any], axes: Any) -> None:
    """Exchange, experts on the other SMs, and both at once, by SMs of the exchange."""
    for name in sorted({entry["backend"] for entry in found["backends"].values()}):
        by_sms = {
            backend["num_sms"]: backend["sizes"][str(found["sms_tokens"])]
            for backend in found["backends"].values()
            if backend["backend"] == name
            and backend["num_sms"] is not None
            and str(found["sms_tokens"]) in backend["sizes"]
        }
        for key, style in (("apart_us", ":"), ("rest_us", "--"), ("both_us", "-")):
            points = {sms: by_sms[sms][key] for sms in sorted(by_sms) if key in by_sms[sms]}
            what = {"apart_us": "exchange", "rest_us": "experts", "both_us": "both at once"}[key]
            if points:
                label = f"{name}: {what}"
                axes.plot(
                    points.keys(), points.values(), style, color=_color(found, name), label=label
                )
    title = f"us by SMs of the exchange, {found['sms_tokens']:,} tokens a rank"
    axes.set(title=title, xlabel="SMs of the exchange")
