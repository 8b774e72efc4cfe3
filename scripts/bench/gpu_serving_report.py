"""The table of a report of bench_gpu_serving: loads against floors, the start by stages, a step by parts."""

from collections.abc import Sequence
from typing import Any

from scripts.bench.results import devices, origin_line

# vLLM 0.26 (data parallel 4, expert parallel, CUDA graphs) on four H200 with the same weights' shapes:
# output tok/s or, for the last, total tok/s.
PEER = {
    (512, 1024, 1024): "24,030 out",
    (128, 128, 512): "11,767 out",
    (256, 4096, 8): "152,231 total",
}


def page(report: dict[str, Any], _name: str) -> str:
    """All of the .md but its notes."""
    backends = report["resolved"]["backends"]
    chosen = ", ".join(f"{family} {choice['name']}" for family, choice in backends.items())
    config = report["resolved"]["config"]
    assumed = report["assumed_hardware"]
    lines = [
        "# Served speed on GPUs",
        "",
        f"{origin_line(report)} {report['ranks']} rank(s).",
        f"Backends: {chosen}. Model {config['model']['path']}, weights "
        f"{config['model']['weights']}, routing {config['model']['routing']['kind']}; through HTTP, "
        "random prompts, answers of full length.",
        f"Floors: {assumed['memory_bytes'] / 1e12:g} TB/s, {assumed['flops'] / 1e12:g} TFLOP/s, "
        f"{assumed['link_bytes'] / 1e9:g} GB/s of links, all overlapped, nothing else.",
        "",
        *_loads(report),
        "",
        *(_a_gpu(report) if report.get("shape") else ()),
        *kinds_table(report["loads"]),
        *energy_table(report["loads"]),
        *_start(report),
        "",
        *_steps(report),
    ]
    if "against" in report:
        lines += ["", *against_table(report)]
    return "\n".join(lines) + "\n"


def _loads(report: dict[str, Any]) -> list[str]:
    lines = [
        "| in flight / in / out | output tok/s | floor | total tok/s | floor | of the floor "
        "| first token p50 / p99 (ms) | per token p50 / p99 (ms) | floor of a decode step (ms) "
        "| errors | vLLM 0.26, 4 H200 |",
        "|---|" + "---:|" * 10,
    ]
    peer = PEER if devices(report) == "4 x NVIDIA H200" else {}
    for load in report["loads"]:
        result, floor = load["result"], load["floor"]
        key = load["in_flight"], load["input_len"], load["output_len"]
        step = floor["decode_step"]
        cells = [
            f"{result['output_tokens_per_s']:,.0f}",
            f"{floor['output_tokens_per_s']:,.0f}",
            f"{result['total_tokens_per_s']:,.0f}",
            f"{floor['total_tokens_per_s']:,.0f}",
            f"{result['total_tokens_per_s'] / floor['total_tokens_per_s']:.0%}",
            _pair(result["ttft_ms"]),
            _pair(result["tpot_ms"]),
            f"{1e3 * max(step.values()):.2f}",
            str(sum(result["errors"].values())),
            peer.get(key, "-"),
        ]
        lines.append(f"| {label_of(load)} | " + " | ".join(cells) + " |")
    return lines


def _a_gpu(report: dict[str, Any]) -> list[str]:
    """Rates of one GPU: of all tokens, and of decodes at the median time between two tokens."""
    lines = [
        "| in flight / in / out | total tok/s a GPU | between tokens p50 (ms) | decode tok/s a GPU |",
        "|---|---:|---:|---:|",
    ]
    for load in report["loads"]:
        result, of_rank = load["result"], load["in_flight"] / report["ranks"]
        between_ms = result["itl_ms"]["p50"]
        total = f"{result['total_tokens_per_s'] / report['ranks']:,.0f}"
        decode = f"{between_ms:.1f} | {1e3 * of_rank / between_ms:,.0f}" if between_ms else "- | -"
        lines.append(f"| {label_of(load)} | {total} | {decode} |")
    return [*lines, ""]


def kinds_table(loads: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the floors of each kind of layer; nothing for reports from before there were kinds."""
    loads = [load for load in loads if "decode_kinds" in load["floor"]]
    if not loads:
        return []
    kinds = list(loads[0]["floor"]["decode_kinds"])
    lines = [
        f"| floors (ms) of {', '.join(kinds)} | prefill | a decode step |",
        "|---|---:|---:|",
    ]
    for load in loads:
        parts = (load["floor"][name] for name in ("prefill_kinds", "decode_kinds"))
        of_kinds = (
            " + ".join(f"{1e3 * max(part[kind].values()):,.2f}" for kind in kinds) for part in parts
        )
        lines.append(f"| {label_of(load)} | {' | '.join(of_kinds)} |")
    return [*lines, ""]


def energy_table(loads: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of joules; nothing for CPUs and for reports from before they were counted."""
    loads = [load for load in loads if load.get("joules")]
    if not loads:
        return []
    lines = [
        "| energy of the GPUs (NVML) | J | mJ a token of prompts and answers |",
        "|---|---:|---:|",
    ]
    for load in loads:
        tokens = load["requests"] * (load["input_len"] + load["output_len"])
        of_token = 1e3 * load["joules"] / tokens
        lines.append(f"| {label_of(load)} | {load['joules']:,.0f} | {of_token:,.1f} |")
    return [*lines, ""]


def against_table(report: dict[str, Any]) -> list[str]:
    """Return a table of both servers' tokens a second."""
    other = report["against"]
    lines = [
        f"| in flight / in / out: total tok/s | here | with {', '.join(other['settings'])} | here / there |",
        "|---|---:|---:|---:|",
    ]
    for load, there in zip(report["loads"], other["loads"], strict=True):
        rates = [one["result"]["total_tokens_per_s"] for one in (load, there)]
        ratio = rates[0] / rates[1]
        lines.append(f"| {label_of(load)} | {rates[0]:,.0f} | {rates[1]:,.0f} | {ratio:.3f} |")
    return lines


def _start(report: dict[str, Any]) -> list[str]:
    stages = ", ".join(f"{name} {s:.1f}" for name, s in report["start_stages_s"].items())
    total = report["start_to_first_answer_s"]
    return [f"Start to first answer: {total:.1f} s (stages in s: {stages})."]


def _steps(report: dict[str, Any]) -> list[str]:
    names = list(report["loads"][0]["ranks"][0]["ms_per_step"]) if report["loads"] else []
    lines = [
        "| mean of a step, rank 0 (ms) | steps | " + " | ".join(names) + " | preemptions |",
        "|---|---:|" + "---:|" * (len(names) + 1),
    ]
    for load in report["loads"]:
        rank = load["ranks"][0]
        parts = " | ".join(f"{rank['ms_per_step'][name]:.3f}" for name in names)
        lines.append(f"| {label_of(load)} | {rank['steps']} | {parts} | {rank['preemptions']} |")
    return lines


def label_of(load: dict[str, Any]) -> str:
    """Return `in flight / in / out` of a load."""
    return f"{load['in_flight']} / {load['input_len']} / {load['output_len']}"


def _pair(latency: dict[str, float | None]) -> str:
    return " / ".join("-" if latency[k] is None else f"{latency[k]:.1f}" for k in ("p50", "p99"))
