"""Turns rounds of figures into a table for people and JSON for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.bench import machine
from cluster.bench.load import Load, Target
from cluster.bench.metrics import RoundResult, middle

LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "between chunks",
    "e2e_ms": "whole answer",
}
RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "total tok/s",
}


def build_report(
    load: Load, targets: Sequence[Target], rounds: Mapping[str, Sequence[RoundResult]]
) -> dict[str, Any]:
    """Plain data: the load, the machine, and for each server its median and every round.

    `ratio` is a server's median output rate over that of the first server.
    """
    servers = []
    for target in targets:
        results = rounds[target.name]
        server = {
            "name": target.name,
            "url": target.url,
            "model": target.model,
            "prompts": "text" if target.text_length else "token ids",
            "ignore_eos": target.ignore_eos,
            "median": middle(results),
            "rounds": [asdict(result) for result in results],
        }
        servers.append(server)
    base = servers[0]["median"]["output_tokens_per_s"]
    for server in servers:
        rate = server["median"]["output_tokens_per_s"]
        server["ratio"] = round(rate / base, 3) if base else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": asdict(load),
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "servers": servers,
    }


def render(report: Mapping[str, Any], console: Console) -> None:
    """Print the medians, one column a server."""
    load, hardware = report["load"], report["hardware"]
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    console.print(
        f"{load['endpoint']}: {load['requests']} requests, {load['concurrency']} in flight, "
        f"{load['input_len']} in / {load['output_len']} out, median of {load['rounds']} round(s)"
    )
    console.print(f"{hardware['cpu']}, {hardware['cores']} cores, {gpus}")
    table = Table(box=None)
    table.add_column("")
    for server in report["servers"]:
        table.add_column(server["name"], justify="right")
    medians = [server["median"] for server in report["servers"]]
    for key, label in RATES.items():
        table.add_row(label, *(f"{median[key]:,.1f}" for median in medians))
    for key, label in LATENCIES.items():
        for part in ("mean", "p50", "p99"):
            table.add_row(f"{label}, {part} (ms)", *(_number(m[key][part]) for m in medians))
    table.add_row("prompt tokens", *(f"{median['prompt_tokens']:,.0f}" for median in medians))
    table.add_row("output tokens", *(f"{median['output_tokens']:,.0f}" for median in medians))
    table.add_row("errors", *(_errors(median["errors"]) for median in medians))
    if len(medians) > 1:
        ratios = [server["ratio"] for server in report["servers"]]
        table.add_row("output rate to the first", *(_number(ratio) for ratio in ratios))
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _errors(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in errors.items()) or "0"
