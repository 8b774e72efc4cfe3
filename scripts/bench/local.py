"""Speed, memory, start and stop of Phalanx on this machine, beside `transformers serve`.

One server runs at a time; the servers take turns for several cycles, so that a slow spell of the
machine meets all of them. All get the same random checkpoint and the same prompts as text. Writes
JSON and prints a markdown table. Run it as scripts/bench_local.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from cluster.bench import loop
from cluster.bench.load import Driver, Load
from cluster.bench.metrics import RoundResult, middle
from scripts.bench import ROOT
from scripts.bench.results import add_options, origin, save
from scripts.bench.servers import (
    ServerProcess,
    free_port,
    phalanx_command,
    resolved,
    transformers_command,
)
from scripts.make_checkpoint import make_checkpoint

CACHE = ("model.max_model_len=2048", "cache.num_blocks=1024")  # all of the heavier load fits
SHORT = "8 in flight, 64 in / 64 out"
LONG = "32 in flight, 256 in / 128 out"


@dataclass
class Contestant:
    """One server and what was measured of it. `settings` are for Phalanx, None for the others."""

    name: str
    command: Callable[[int], list[str]]
    model: str
    settings: list[str] | None = None
    start_s: list[float] = field(default_factory=list)
    stop_s: list[float | None] = field(default_factory=list)
    rounds: dict[str, list[RoundResult]] = field(default_factory=dict)
    rank_rates: list[float] = field(default_factory=list)  # tokens over time in steps, rank 0
    memory_mb: list[dict[str, float]] = field(default_factory=list)
    idle_cpu_percent: dict[str, float] = field(default_factory=dict)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=2, help="how often each server is started")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of load in a cycle")
    parser.add_argument("--requests", type=int, default=128, help="requests of a round")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="setting for Phalanx")
    add_options(parser, "cpu-local", drawn=False)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        report = run(options, Path(folder))
    save(options.out, report)
    print(markdown(report))
    print(f"\nwrote {options.out.with_suffix('.json')}", file=sys.stderr)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All cycles; the report."""
    checkpoint = make_checkpoint(folder / "random-moe")  # 4 layers, hidden 128, 16 experts top-4
    config = folder / "bench.yaml"
    config.write_text(f"model: {{path: {checkpoint}}}\n", encoding="utf-8")
    loads = make_loads(options)
    contestants = make_contestants(options, config, checkpoint)
    engine_rates: list[float] = []
    for cycle in range(options.cycles):
        engine_rates += measure_engine(loads[SHORT], cycle, config, options.set)
        for contestant in contestants:
            measure(contestant, loads, cycle, folder / f"{cycle}-{contestant.name}.log", config)
    return {
        "method": __doc__,
        **origin(0, options.commit, served=True),
        "loads": {name: load.__dict__ for name, load in loads.items()},
        "cycles": options.cycles,
        "engine_alone_output_tokens_per_s": engine_rates,
        "servers": {c.name: describe(c, config) for c in contestants},
    }


def make_loads(options: argparse.Namespace) -> dict[str, Load]:
    """The protocol's load, and a heavier one."""
    short = Load(
        endpoint="completions",
        requests=options.requests,
        concurrency=8,
        input_len=64,
        output_len=64,
        warmup=16,
        rounds=options.rounds,
        seed=0,
        temperature=0.0,
        ignore_eos=True,
        prompts="text",
        vocab_size=256,
        timeout_s=300.0,
    )
    long = replace(short, requests=64, concurrency=32, input_len=256, output_len=128, rounds=1)
    return {SHORT: short, LONG: long}


def make_contestants(
    options: argparse.Namespace, config: Path, checkpoint: Path
) -> list[Contestant]:
    """Phalanx with one and with two ranks, and transformers."""
    found = []
    for ranks in (1, 2):
        settings = [f"cluster.ranks={ranks}", "cluster.device=cpu", *CACHE, *options.set]

        def command(port: int, settings: list[str] = settings) -> list[str]:
            return phalanx_command(config, port, settings)

        found.append(Contestant(f"phalanx-{ranks}-rank", command, checkpoint.name, settings))
    if not options.skip_transformers:

        def peer(port: int) -> list[str]:
            return transformers_command(Path(sys.executable), checkpoint, port)

        found.append(Contestant("transformers-serve-cb", peer, str(checkpoint)))
    return found


def measure(
    contestant: Contestant, loads: dict[str, Load], cycle: int, log: Path, config: Path
) -> None:
    """Start, load, look, stop."""
    print(f"cycle {cycle + 1}: {contestant.name}", file=sys.stderr)
    port = free_port()
    server = ServerProcess(contestant.command(port), port, contestant.model, log)
    try:
        contestant.start_s.append(server.start_s)
        print(f"  first answer after {server.start_s:.1f} s", file=sys.stderr)
        for name, load in loads.items():
            if name != SHORT and contestant.settings is None:
                continue  # its cache is sized for the short load
            before = None if contestant.settings is None else server.first_rank()
            results = loop.run(send(load, server.url, contestant, cycle))
            if before is not None and name == SHORT:
                tokens, seconds = (
                    new - old for new, old in zip(server.first_rank(), before, strict=True)
                )
                contestant.rank_rates.append(tokens / seconds)
            contestant.rounds.setdefault(name, []).extend(results)
            rates = ", ".join(f"{result.output_tokens_per_s:,.0f}" for result in results)
            print(f"  {name}: {rates} output tok/s", file=sys.stderr)
            if name == SHORT and contestant.settings is not None and cycle == 0:
                look(server, contestant, config)
    finally:
        contestant.stop_s.append(server.stop())


def measure_engine(load: Load, cycle: int, config: Path, sets: list[str]) -> list[float]:
    """Output tok/s of one rank's step loop under the same load, without Ray and HTTP."""
    print(f"cycle {cycle + 1}: the engine alone", file=sys.stderr)
    command = [sys.executable, "-m", "scripts.bench.engine", str(config)]
    for setting in ("cluster.device=cpu", *CACHE, *sets):
        command += ["--set", setting]
    for name in ("requests", "concurrency", "input_len", "output_len", "rounds"):
        command += [f"--{name.replace('_', '-')}", str(getattr(load, name))]
    command += ["--seed", str(cycle)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    rates = json.loads(found.stdout.splitlines()[-1])
    print(f"  {SHORT}: {', '.join(f'{rate:,.0f}' for rate in rates)} output tok/s", file=sys.stderr)
    return rates


def look(server: ServerProcess, contestant: Contestant, config: Path) -> None:
    """Memory after the load of the protocol, and CPU time with nothing to do."""
    assert contestant.settings is not None
    ranks = resolved(config, contestant.settings)["ranks"]
    contestant.memory_mb = server.rank_memory(
        [row["weight_bytes"] for row in ranks], [row["kv_bytes"] for row in ranks]
    )
    contestant.idle_cpu_percent = server.idle_cpu_percent()


async def send(load: Load, url: str, contestant: Contestant, cycle: int) -> list[RoundResult]:
    """Warm up, then the rounds of one cycle; their prompts are new in every cycle."""
    driver = Driver(load, {})
    (target,) = await driver.prepare({contestant.name: url}, contestant.model)
    await driver.run_round(target, -1 - cycle, load.warmup)
    first = cycle * load.rounds
    return [
        await driver.run_round(target, first + index, load.requests) for index in range(load.rounds)
    ]


def describe(contestant: Contestant, config: Path) -> dict[str, Any]:
    """Plain data of one server."""
    description: dict[str, Any] = {
        "start_to_first_answer_s": [round(value, 2) for value in contestant.start_s],
        "stop_s": [value and round(value, 2) for value in contestant.stop_s],
        "loads": {
            name: {
                "median": middle(results),
                "output_tokens_per_s": [result.output_tokens_per_s for result in results],
            }
            for name, results in contestant.rounds.items()
        },
    }
    if contestant.settings is not None:
        description["resolved"] = resolved(config, contestant.settings)
        description["rank_0_tokens_per_s_of_steps"] = contestant.rank_rates
        description["rank_memory_mb"] = contestant.memory_mb
        description["idle_cpu_percent_of_a_core"] = contestant.idle_cpu_percent
    return description


def markdown(report: dict[str, Any]) -> str:
    """The table for a README: a column a server."""
    servers = report["servers"]
    hardware = report["hardware"]
    lines = [
        f"{hardware['cpu']}, {hardware['cores']} cores, {report['date'][:10]}; medians.",
        "",
        "| | " + " | ".join(servers) + " |",
        "|---|" + "---:|" * len(servers),
    ]

    def row(label: str, values: list[str]) -> None:
        lines.append(f"| {label} | " + " | ".join(values) + " |")

    for load in report["loads"]:
        found = [server["loads"].get(load) for server in servers.values()]
        medians = [entry and entry["median"] for entry in found]

        def figures(label: str, show: Callable[[dict], str], medians: list = medians) -> None:
            row(label, [show(m) if m else "-" for m in medians])

        figures(f"**{load}**: output tok/s", lambda m: f"{m['output_tokens_per_s']:,.0f}")
        figures("requests/s", lambda m: f"{m['requests_per_s']:.1f}")
        figures("first token, p50 / p99 (ms)", lambda m: _pair(m["ttft_ms"]))
        figures("per output token, p50 / p99 (ms)", lambda m: _pair(m["tpot_ms"]))
        figures("errors", lambda m: str(sum(m["errors"].values())))
    row(
        "start to first answer (s)",
        [f"{median(s['start_to_first_answer_s']):.1f}" for s in servers.values()],
    )
    row("Ctrl-C to end (s)", [_stop(server) for server in servers.values()])
    row("rank memory beyond weights (MB)", [_memory(server) for server in servers.values()])
    alone = median(report["engine_alone_output_tokens_per_s"])
    serving = median(servers["phalanx-1-rank"]["rank_0_tokens_per_s_of_steps"])
    lines += [
        "",
        f"One rank's engine, {SHORT}: {alone:,.0f} output tok/s alone on the machine, "
        f"{serving:,.0f} by the time in its steps while it serves (medians).",
    ]
    return "\n".join(lines)


def _pair(latency: dict[str, float | None]) -> str:
    return " / ".join("-" if latency[k] is None else f"{latency[k]:.1f}" for k in ("p50", "p99"))


def _stop(server: dict[str, Any]) -> str:
    times = server["stop_s"]
    return "killed" if None in times else f"{median(times):.1f}"


def _memory(server: dict[str, Any]) -> str:
    ranks = server.get("rank_memory_mb")
    return ", ".join(f"{rank['beyond_weights']:.0f}" for rank in ranks) if ranks else "-"


if __name__ == "__main__":
    main()
