"""Formats a session as plain data for JSON and as a table."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from math import isinf
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.bench import machine
from cluster.bench.metrics import middle
from cluster.bench.ratios import COMPARED, compare, ratio_name
from cluster.bench.session import ServerRun, Session
from cluster.bench.settings import Load
from cluster.bench.stream import Answer

LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "between chunks",
    "worst_gap_ms": "worst gap of a stream",
    "e2e_ms": "whole answer",
}
RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "total tok/s",
}
CACHED_SHARE = 0.2  # more of random prompts than a chat template explains
LATE_MS = 5.0  # a client that sends later than this no longer keeps the schedule


def build_report(load: Load, session: Session, with_requests: bool = False) -> dict[str, Any]:
    """Return the load, the machine, and for each server the median, every round, and the ratios to the first server.

    `with_requests` adds a row for each request.
    """
    settings = asdict(load)
    if load.request_rate is not None and isinf(load.request_rate):
        settings["request_rate"] = "inf"  # JSON has no infinity
    servers: list[dict[str, Any]] = []
    for server in session.servers:
        results = server.results(load.goodput)
        target = server.target
        entry: dict[str, Any] = {
            "name": target.name,
            "url": target.url,
            "model": target.model,
            "prompts": _prompt_form(load, server),
            "ignore_eos": target.ignore_eos,
            "median": middle(results),
            "rounds": [asdict(result) for result in results],
        }
        if servers:
            entry["ratios"] = compare(entry["rounds"], servers[0]["rounds"])
        if with_requests:
            entry["requests"] = request_rows(server)
        servers.append(entry)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "interrupted": session.interrupted,
        "load": settings,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "servers": servers,
    }


def request_rows(server: ServerRun) -> list[dict[str, Any]]:
    """Return one row for each finished request; seconds count from the start of its round."""
    rows = []
    for index, each in enumerate(server.rounds):
        ended = [answer for answer in each.answers if answer.ended]
        zero = min((answer.started for answer in ended), default=0.0)
        rows += [_row(index, answer, zero) for answer in ended]
    return rows


def _row(round_index: int, answer: Answer, zero: float) -> dict[str, Any]:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1000, 3)

    return {
        "round": round_index,
        "due_s": round(answer.started - zero, 6),
        "sent_s": round(answer.sent - zero, 6),
        "ttft_ms": ms(answer.ttft),
        "tpot_ms": ms(answer.tpot),
        "e2e_ms": ms(answer.e2e),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
        "accepted_drafts": answer.accepted_drafts,
        "rejected_drafts": answer.rejected_drafts,
        "chunks_s": [round(time - zero, 6) for time in answer.chunk_times],
        "error": answer.error,
    }


def _prompt_form(load: Load, server: ServerRun) -> str:
    if load.prompts_file is not None:
        return "file"
    return "text" if server.target.text_length else "token ids"


def render(report: Mapping[str, Any], console: Console) -> None:
    """Print the medians, one column for each server, then the ratios to the first server."""
    hardware, servers = report["hardware"], report["servers"]
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    rounds = report["load"]["rounds"]
    console.print(f"{_describe_load(report['load'])}, median of {rounds} round(s)")
    console.print(f"{hardware['cpu']}, {hardware['cores']} cores, {gpus}")
    if report["interrupted"]:
        console.print("interrupted: only the requests that ended are counted")
    table = Table(box=None)
    table.add_column("")
    for server in servers:
        table.add_column(server["name"], justify="right")
    medians = [server["median"] for server in servers]
    _add_figures(table, report["load"], medians)
    console.print(table)
    _render_ratios(servers, console)
    for server in servers:
        for remark in _remarks(report["load"], server["median"]):
            console.print(f"{server['name']}: {remark}")


def _describe_load(load: Mapping[str, Any]) -> str:
    """Describe a load in one line."""
    if load["request_rate"] is None:
        how = f"{load['concurrency']} in flight"
    else:
        rate = float(load["request_rate"])
        how = "arriving all at once" if isinf(rate) else f"{rate:g} requests/s arriving"
        how += "" if load["burstiness"] == 1 else f" (burstiness {load['burstiness']:g})"
        how += f", at most {load['concurrency']} in flight" if load["concurrency"] else ""
    what = f"{load['input_len']} in / {load['output_len']} out"
    if load["prompts_file"] is not None:
        what = f"prompts of {load['prompts_file']}"
    elif load["prefix_groups"]:
        what += f" behind {load['prefix_groups']} prefixes of {load['prefix_tokens']} tokens"
    return f"{load['endpoint']}: {load['requests']} requests, {how}, {what}"


def _add_figures(table: Table, load: Mapping[str, Any], medians: list[dict[str, Any]]) -> None:
    for key, label in RATES.items():
        table.add_row(label, *(_number(median[key], 1) for median in medians))
    for name in load["goodput"]:
        limit = f"{name} within {load['goodput'][name]:g} ms"
        table.add_row(limit, *(_share(median["goodput"]["met"][name]) for median in medians))
    if load["goodput"]:
        goodputs = [median["goodput"] for median in medians]
        table.add_row("within all limits", *(_share(goodput["share"]) for goodput in goodputs))
        rates = (_number(goodput["requests_per_s"], 1) for goodput in goodputs)
        table.add_row("goodput requests/s", *rates)
    for key, label in LATENCIES.items():
        for part in ("mean", "p50", "p90", "p99", "max"):
            table.add_row(f"{label}, {part} (ms)", *(_number(m[key][part]) for m in medians))
    for key in ("prompt_tokens", "cached_tokens", "output_tokens", "max_in_flight"):
        table.add_row(key.replace("_", " "), *(_number(m[key], 0) for m in medians))
    shares = [median["accepted_draft_share"] for median in medians]
    if any(share is not None for share in shares):
        table.add_row("accepted drafts", *map(_share, shares))
    table.add_row("errors", *(_errors(median["errors"]) for median in medians))


def _render_ratios(servers: list[dict[str, Any]], console: Console) -> None:
    others = [server for server in servers if "ratios" in server]
    if not others:
        return
    table = Table(box=None)
    table.add_column(f"ratio to {servers[0]['name']}")
    for server in others:
        table.add_column(server["name"], justify="right")
    for key, part, label in COMPARED:
        found = [server["ratios"].get(ratio_name(key, part)) for server in others]
        if any(found):
            table.add_row(label, *(_ratio(ratio) for ratio in found))
    console.print(table)


def _remarks(load: Mapping[str, Any], median: Mapping[str, Any]) -> list[str]:
    """Return warnings about conditions that distort the figures."""
    found = []
    is_unique = load["prompts_file"] is None and not load["prefix_groups"]
    cached, prompt_tokens = median["cached_tokens"] or 0, median["prompt_tokens"] or 0
    if is_unique and cached > CACHED_SHARE * prompt_tokens:
        found.append(
            "has these prompts in its cache from an earlier run; another --seed makes new ones"
        )
    if median["output_tokens"] is None and median["completed"]:
        found.append("sends no usage, so there are no figures of tokens")
    lag = median["send_lag_ms"]["p99"]
    if lag is not None and lag > LATE_MS:
        found.append(f"requests were sent late, p99 {lag:,.1f} ms; that counts in their latency")
    return found


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _ratio(ratio: Mapping[str, float] | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


def _errors(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in errors.items()) or "0"
