"""The figures, the page and the plot of experts.py; nothing here needs a GPU. D hidden, I expert width."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.bench.results import devices, markdown_table, missing_lines, origin_line

MEMORY, BF16, FP8 = (
    4.0e12,
    750e12,
    1500e12,
)  # of one H200, as far as they can be had: bytes/s, FLOP/s


def flops(rows: int, hidden: int, width: int) -> int:
    """Of the products of `rows` rows, each with one expert: gate, up and down."""
    return rows * 6 * hidden * width


def floors(
    rows: int, used_experts: int, num_tokens: int, shape: dict[str, int], *, fp8: bool
) -> dict[str, float]:
    """What memory and tensor cores need at least, us: weights of the used experts, bfloat16 tokens in and out once."""
    hidden, width = shape["hidden"], shape["width"]
    weight_bytes = used_experts * 3 * hidden * width * (1 if fp8 else 2)
    moved = weight_bytes + 2 * num_tokens * hidden * 2
    memory_us = moved / MEMORY * 1e6
    compute_us = flops(rows, hidden, width) / (FP8 if fp8 else BF16) * 1e6
    return {
        "floor_us": round(max(memory_us, compute_us), 2),
        "memory_floor_us": round(memory_us, 2),
        "compute_floor_us": round(compute_us, 2),
    }


def tokens_per_expert(num_tokens: int, shape: dict[str, int]) -> float:
    """The mean over all experts, of `num_tokens` tokens on each rank."""
    ranks = shape["experts"] // shape["local_experts"]
    return num_tokens * ranks * shape["top_k"] / shape["experts"]


def add(found: dict[str, Any], reports: Iterable[dict[str, Any]]) -> None:
    """What a backend's process reported, into the results."""
    shape = found["shape"]
    ranks = shape["experts"] // shape["local_experts"]
    for report in reports:
        if "about" in report:
            found["backends"][report["variant"]] = report["about"] | {"sizes": {}}
        elif "times" in report:
            entry, times, size = (
                found["backends"][report["variant"]],
                report["times"],
                report["tokens"],
            )
            rows, used = report["rows"], report["used_experts"]
            done = flops(rows, shape["hidden"], shape["width"])
            entry["sizes"][str(size)] = {
                "rows": rows,
                "used_experts": used,
                "tokens_per_expert": tokens_per_expert(size, shape),
                **times,
                "tflops": round(done / times["products_us"] / 1e6, 1),
                **floors(rows, used, size * ranks, shape, fp8=entry["fp8"]),
            }


def page(found: dict[str, Any], name: str) -> str:
    """All of the .md but its notes."""
    shape, ceilings = found["shape"], found["ceilings"]
    missing = missing_lines(found["missing"])
    return f"""# One rank's experts in one MoE layer

{origin_line(found)}
{shape["local_experts"]} of {shape["experts"]} experts, hidden {shape["hidden"]}, width {shape["width"]}, \
top-{shape["top_k"]}, {found["dtype"]}, uniform random routing: what one of
{shape["experts"] // shape["local_experts"]} ranks does for the tokens of all. No exchange.

A cell is **us of the products / TFLOP/s / us of a layer**. Products: gate and up, activation, down; fetching rows in
expert order and quantising them included where the backend needs it (masked rows come as it needs them). A layer: that
with routing and weighted sums. The median of {found["rounds"]} runs, each {found["in_graph"]} calls as one CUDA graph \
(eagerly where marked *); {found["layers"]} layers'
weights take turns, so that none is found in the cache, and so do products and layers. Floors: the larger of used \
experts' weights
and tokens in and out at {ceilings["memory_bytes_per_s"] / 1e12:g} TB/s, and the products at \
{ceilings["bf16_flops"] / 1e12:g} TFLOP/s ({ceilings["fp8_flops"] / 1e12:g} in FP8).

{table(found)}
![TFLOP/s and time by tokens per expert]({name}.png)

{chr(10).join(missing)}
"""


def table(found: dict[str, Any]) -> str:
    """Backends by tokens: us, TFLOP/s, us of the layer; the fastest products of bfloat16 in bold."""
    backends = found["backends"]
    rows = []
    for tokens in map(str, found["tokens"]):
        at = {name: entry["sizes"].get(tokens) for name, entry in backends.items()}
        exact = [
            row["products_us"] for name, row in at.items() if row and not backends[name]["fp8"]
        ]
        best = min(exact, default=None)
        cells = [_cell(row, best) for row in at.values()]
        mean = f"{tokens_per_expert(int(tokens), found['shape']):g}"
        floors = [_floor(at, backends, fp8) for fp8 in (False, True)]
        rows.append([f"{int(tokens):,}", mean, *floors, *cells])
    names = [name if entry["graph"] else f"{name} *" for name, entry in backends.items()]
    head = ["tokens a rank", "per expert", "floor", "FP8 floor", *names]
    return markdown_table(head, rows)


def _cell(row: dict[str, float] | None, best: float | None) -> str:
    if row is None:
        return "-"
    us = f"{row['products_us']:g}"
    us = f"**{us}**" if row["products_us"] == best else us
    layer = f"{row['us']:g}" if "us" in row else "-"
    return f"{us} / {row['tflops']:g} / {layer}"


def _floor(at: dict[str, Any], backends: dict[str, Any], fp8: bool) -> str:
    """Of any backend of that format."""
    found = [row["floor_us"] for name, row in at.items() if row and backends[name]["fp8"] == fp8]
    return f"{found[0]:g}" if found else "-"


def plot(found: dict[str, Any], out: Path) -> None:
    """TFLOP/s and time of the products over tokens per expert, with the floors; nothing where nothing was measured."""
    from matplotlib.figure import Figure

    measured = {name: entry for name, entry in found["backends"].items() if entry["sizes"]}
    if not measured:
        return
    figure = Figure(figsize=(13, 5), layout="constrained")
    rates, times = figure.subplots(1, 2)
    floors: dict[bool, dict[str, Any]] = {}
    for name, entry in measured.items():
        rows = list(entry["sizes"].values())
        means = [row["tokens_per_expert"] for row in rows]
        rates.plot(means, [row["tflops"] for row in rows], marker="o", ms=3, label=name)
        times.plot(means, [row["products_us"] for row in rows], marker="o", ms=3, label=name)
        if len(rows) > len(floors.get(entry["fp8"], {})):
            floors[entry["fp8"]] = entry["sizes"]
    for fp8, sizes in floors.items():
        means = [row["tokens_per_expert"] for row in sizes.values()]
        style, label = ("k:", "floor, FP8") if fp8 else ("k--", "floor, bf16")
        floor_us = [row["floor_us"] for row in sizes.values()]
        times.plot(means, floor_us, style, lw=1, label=label)
        shape = found["shape"]
        ceiling = [
            flops(row["rows"], shape["hidden"], shape["width"]) / row["floor_us"] / 1e6
            for row in sizes.values()
        ]
        rates.plot(means, ceiling, style, lw=1, label=label)
    for axes, title in ((rates, "products, TFLOP/s"), (times, "products, us")):
        axes.set(xscale="log", yscale="log", title=title, xlabel="tokens per expert")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"{devices(found)}, {found['shape']['local_experts']} experts of a rank")
    figure.savefig(out.with_suffix(".png"), dpi=110)
