"""The page of all released shapes that were served on GPUs: rates beside floors and targets.

    python -m scripts.bench.gpu_families

It draws docs/results/gpu-families.md from the files gpu-families-*.json beside it, which bench_gpu_serving writes with
`--shape` and `--out`. Measures nothing.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench import ROOT
from scripts.bench.gpu_serving_report import against_table, kinds_table, label_of
from scripts.bench.released_shapes import model_folder
from scripts.bench.results import devices, kept_notes, load
from scripts.bench.roofline import Floor, floor_of
from workers.models.registry import load_model_config

RESULTS = ROOT / "docs" / "results"
PAGE = RESULTS / "gpu-families.md"
PREFILL_RATIO = 64  # a load with this many prompt tokens for each answer token measures prefill
MANY_TOKENS = 64  # of an answer; the gaps between fewer are those of prompts beside them
Report = dict[str, Any]


@dataclass(frozen=True)
class Targets:
    """The targets of a shape on four GPUs: (target, further target).

    layers       layers of the shape that the targets are for
    prefill      tokens/s of a GPU
    decode       answer tokens/s of a GPU, at the median time between two tokens
    output       answer tokens/s of all GPUs
    of_floor     in place of rates: shares of the floor, of loads by their input and output tokens
    """

    layers: int
    prefill: tuple[float, float] = (0.0, 0.0)
    decode: tuple[float, float] = (0.0, 0.0)
    output: tuple[float, float] | None = None
    of_floor: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)


TARGET_RANKS = 4
QWEN3_6 = {(1024, 1024): (0.65, 0.75), (128, 512): (0.55, 0.65), (4096, 8): (0.5, 0.6)}
PRECISIONS = {None: "bf16", "fp8": "FP8", "mxfp4": "experts MXFP4", "int4": "int4"}
TARGETS = {
    ("deepseek-v3", None): Targets(16, prefill=(20_000, 24_000), decode=(3_600, 4_000)),
    ("deepseek-v3", "fp8"): Targets(16, prefill=(27_000, 34_000), decode=(6_000, 7_200)),
    ("gpt-oss-120b", None): Targets(36, output=(11_000, 16_000)),
    ("glm-4.5-air", "fp8"): Targets(
        46, of_floor={(1024, 1024): (0.7, 0.8), (128, 512): (0.7, 0.8), (4096, 8): (0.6, 0.7)}
    ),
    ("qwen3.6-35b-a3b", None): Targets(40, of_floor=QWEN3_6),
    ("qwen3.6-35b-a3b", "fp8"): Targets(40, of_floor=QWEN3_6),
}


def main() -> None:
    """Draw the page again; its notes stay."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PAGE, help="the page (default: %(default)s)")
    out = parser.parse_args().out
    notes = kept_notes(out.read_text()) if out.exists() else ""
    out.write_text(page(reports(RESULTS)) + notes)
    print(out.read_text())


def reports(folder: Path) -> dict[str, Report]:
    """Return the reports by file name, in the order of shapes, then of names."""
    found = {path.stem: load(path) for path in sorted(folder.glob("gpu-families-*.json"))}
    order = list(dict.fromkeys(shape for shape, _ in TARGETS))
    return dict(sorted(found.items(), key=lambda one: order.index(one[1]["shape"][0])))


def page(found: dict[str, Report]) -> str:
    """Return all of the page but its notes."""
    first = next(iter(found.values()))
    assumed = first["assumed_hardware"]
    lines = [
        "# Released shapes served on GPUs",
        "",
        "Layer shapes of released models, random weights, uniform routing; through HTTP, random prompts, answers of "
        "full length. Each file in the last table has the hardware, the commit and all versions.",
        f"Floors: {assumed['memory_bytes'] / 1e12:g} TB/s, {assumed['flops'] / 1e12:g} TFLOP/s, "
        f"{assumed['fp8_flops'] / 1e12:g} TFLOP/s in FP8, {assumed['link_bytes'] / 1e9:g} GB/s of links, "
        "all overlapped, nothing else.",
        "",
        "| shape | weights | layers | GPUs | in flight / in / out | tok/s a GPU | output tok/s | of the floor "
        "| between tokens p50 (ms) | decode tok/s a GPU | target / further target | errors |",
        "|---|---|---:|---:|---|" + "---:|" * 7,
    ]
    for report in found.values():
        lines += [_load_row(report, one) for one in report["loads"]]
    lines += [
        "",
        "| shape | weights | GPUs | start to first answer (s) | kernels (s) | graphs (s) | exchange "
        "| grouped GEMM | attention | commit | figures |",
        "|---|---|---|---:|---:|---:|---|---|---|---|---|",
    ]
    lines += [_start_row(name, report) for name, report in found.items()]
    for report in found.values():
        if any(report["loads"][0]["floor"].get("decode_kinds", {}).get("delta nets", {}).values()):
            lines += ["", f"{_shape(report)[0]}, {_shape(report)[1]}:", ""]
            lines += kinds_table(report["loads"])[:-1]
        if "against" in report:
            lines += ["", f"{_shape(report)[0]}, {_shape(report)[1]}:", "", *against_table(report)]
    return "\n".join(lines) + "\n"


def _shape(report: Report) -> tuple[str, str, int]:
    """Return the shape, the precision of its weights, of states too if they are narrower than usual, and its layers."""
    shape, layers, _ = report["shape"]
    states = report["resolved"]["config"]["cache"].get("state_dtype")  # the older reports have none
    precision = PRECISIONS[quantization(report)]
    return shape, f"{precision}, states bf16" if states == "bfloat16" else precision, layers


def quantization(report: Report) -> str | None:
    """Return the quantization of the checkpoint, of released_shapes.QUANTIZATIONS; the older reports know only FP8."""
    name: str | None = report.get("quantization", "fp8" if report["shape"][2] else None)
    return name


def _load_row(report: Report, one: Report) -> str:
    result, floor, ranks = one["result"], one["floor"], report["ranks"]
    share = result["total_tokens_per_s"] / floor["total_tokens_per_s"]
    decodes = one["output_len"] >= MANY_TOKENS
    cells = [
        *map(str, _shape(report)),
        str(ranks),
        label_of(one),
        f"{result['total_tokens_per_s'] / ranks:,.0f}",
        f"{result['output_tokens_per_s']:,.0f}",
        f"{share:.0%}",
        f"{result['itl_ms']['p50']:.1f}" if decodes else "-",
        f"{decode_rate(report, one):,.0f}" if decodes else "-",
        bar_text(report, one),
        str(sum(result["errors"].values())),
    ]
    return f"| {' | '.join(cells)} |"


def is_prefill(one: Report) -> bool:
    """Return whether this load measures prefill."""
    ratio: float = one["input_len"] / one["output_len"]
    return ratio >= PREFILL_RATIO


def decode_rate(report: Report, one: Report) -> float:
    """Return tokens/s of a GPU at the median time between two tokens."""
    rate: float = 1e3 * one["in_flight"] / report["ranks"] / one["result"]["itl_ms"]["p50"]
    return rate


def bar_text(report: Report, one: Report) -> str:
    """Return what this load must and should reach with the layers and GPUs of the report.

    Rates are those of four GPUs, times the floor here, through the floor there at equal requests of a GPU.
    """
    targets, prefill = TARGETS.get((report["shape"][0], quantization(report))), is_prefill(one)
    if targets is None:
        return "-"
    if targets.of_floor:
        shares = targets.of_floor.get((one["input_len"], one["output_len"]))
        return "-" if shares is None else " / ".join(f"{x:.0%}" for x in shares) + " of the floor"
    here, there = one["floor"], floor_of_targets(report, one, targets.layers)
    if targets.output is not None:
        ratio = here["output_tokens_per_s"] / there.output_tokens_per_s
        return " / ".join(f"{rate * ratio:,.0f}" for rate in targets.output) + " output"
    if prefill:
        of_gpu = TARGET_RANKS / report["ranks"]
        ratio = of_gpu * here["total_tokens_per_s"] / there.total_tokens_per_s
        return " / ".join(f"{rate * ratio:,.0f}" for rate in targets.prefill)
    ratio = there.decode_step.floor_s / max(here["decode_step"].values())
    return " / ".join(f"{rate * ratio:,.0f}" for rate in targets.decode)


def floor_of_targets(report: Report, one: Report, layers: int) -> Floor:
    """Return the floor of this load on four GPUs with all layers of the targets; a GPU has as many requests."""
    precision = quantization(report)
    with tempfile.TemporaryDirectory(prefix="phalanx-model-") as folder:
        model = load_model_config(model_folder(report["shape"][0], layers, Path(folder), precision))
    scheduler = report["resolved"]["config"]["scheduler"]
    return floor_of(
        model,
        TARGET_RANKS,
        in_flight=one["in_flight"] * TARGET_RANKS // report["ranks"],
        input_len=one["input_len"],
        output_len=one["output_len"],
        max_num_batched_tokens=scheduler["max_num_batched_tokens"],
        fp8_experts=precision == "fp8",
    )


def _start_row(name: str, report: Report) -> str:
    shape, weights, _ = _shape(report)
    stages, backends = report["start_stages_s"], report["resolved"]["backends"]
    cells = [
        shape,
        weights,
        devices(report),
        f"{report['start_to_first_answer_s']:.1f}",
        *(f"{stages.get(stage, 0.0):.1f}" for stage in ("kernels", "CUDA graphs")),
        *(backends[family]["name"] for family in ("all2all", "grouped_gemm", "attention")),
        f"{report['commit']}, {report['date'][:10]}",
        f"[{name.removeprefix('gpu-families-')}]({name}.json)",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
