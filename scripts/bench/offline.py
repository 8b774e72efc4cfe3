"""The speed of `phalanx batch` and `LLM.generate` beside the speed of the engine alone, on this machine.

A random model, equal prompts and lengths. The engine alone is one rank without Ray (scripts.bench.engine). Engine,
batch and generate take turns of a few seconds, so that a slow spell of the machine meets all of them; the share of the
engine's speed is the median of the ratios of a turn. `cpu_us_per_token` is the CPU time of the rank's process and of
the process that sends the requests. It depends little on other work of the machine: where both have a core,
`share_of_engine_by_cpu` is the share of the engine's speed. `of_time_in_steps` is the speed over the tokens per second
of the time in steps: the share of the time in which the ranks had work.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console

from cluster.bench.progress import Progress
from cluster.config.load import load_config
from cluster.offline.batch import BatchRun, LocalServer
from cluster.offline.batch_input import BatchInput
from cluster.offline.batch_output import BatchOutput
from cluster.offline.dispatcher import COMPLETIONS
from cluster.offline.engine import OfflineEngine
from cluster.offline.llm import answer_all
from scripts.bench import ROOT
from scripts.bench.results import add_options, origin, save
from scripts.make_checkpoint import make_checkpoint

Rates = dict[str, list[float]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12, help="turns of each")
    parser.add_argument("--requests", type=int, default=384, help="requests of a round")
    parser.add_argument("--seqs", type=int, default=32, help="sequences that a rank runs at once")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--set", action="append", default=[], help="setting for Phalanx")
    add_options(parser, "offline", drawn=False)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        report = run(options, Path(folder))
    save(options.out, report)
    print(json.dumps({name: report[name] for name in report if name.endswith("-rank")}, indent=1))


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All turns; the report."""
    checkpoint = make_checkpoint(folder / "random-moe")  # 4 layers, hidden 128, 16 experts top-4
    path = folder / "bench.yaml"
    path.write_text(f"model: {{path: {checkpoint}}}\n", encoding="utf-8")
    settings = [
        *("cluster.device=cpu", "cache.prefix_caching=false"),
        *(f"scheduler.max_num_seqs={options.seqs}", *options.set),
    ]
    found = {f"{n}-rank": measure(options, path, settings, n) for n in options.ranks}
    load = ("rounds", "requests", "seqs", "input_len", "output_len")
    return {
        "method": __doc__,
        **origin(0, options.commit),
        **{name: getattr(options, name) for name in load},
        **found,
    }


def measure(
    options: argparse.Namespace, path: Path, settings: list[str], ranks: int
) -> dict[str, Any]:
    """All turns with this number of ranks; the engine alone takes part if it is one."""
    config = load_config(path, [*settings, f"cluster.ranks={ranks}"])
    alone = EngineAlone(options, path, settings) if ranks == 1 else None
    try:
        offline = OfflineEngine(config, Console(quiet=True))
        try:
            rates, busy, cpu_us = take_turns(options, offline, alone, path.parent)
        finally:
            offline.close()
    finally:
        if alone is not None:
            alone.close()
    print(ranks, rates, file=sys.stderr)
    found: dict[str, Any] = {
        "output_tokens_per_s": rates,
        "of_time_in_steps": round(busy, 3),
        "cpu_us_per_token": {name: round(value, 1) for name, value in cpu_us.items()},
    }
    if alone is not None:
        found["share_of_engine"] = {
            name: round(median(map(truediv, rates[name], rates["engine"])), 3)
            for name in ("batch", "generate")
        }
        found["share_of_engine_by_cpu"] = round(cpu_us["engine"] / cpu_us["ranks"], 3)
    return found


class EngineAlone:
    """The engine in a process of its own, with as many requests in flight as offline."""

    def __init__(self, options: argparse.Namespace, path: Path, settings: list[str]):
        command = [sys.executable, "-m", "scripts.bench.engine", str(path), "--turns", "--seed=0"]
        command += [part for setting in settings for part in ("--set", setting)]
        command += [f"--requests={options.requests}", f"--concurrency={2 * options.seqs}"]
        command += [f"--input-len={options.input_len}", f"--output-len={options.output_len}"]
        command += ["--rounds=0"]
        self.cpu_s = 0.0
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        self._read()

    def run(self) -> float:
        """Output tok/s of a round; its CPU time is added to `cpu_s`."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        rate, cpu_s = json.loads(self._read())
        self.cpu_s += cpu_s
        return round(rate, 1)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def take_turns(
    options: argparse.Namespace, offline: OfflineEngine, alone: EngineAlone | None, folder: Path
) -> tuple[Rates, float, dict[str, float]]:
    """Output tok/s of each turn after a warm-up, the share of the time in steps, and CPU time a token in us."""
    draw = random.Random(1)

    def bodies(count: int) -> list[dict[str, Any]]:
        fields = {"max_tokens": options.output_len, "temperature": 0.0, "ignore_eos": True}
        prompts = ([draw.randrange(256) for _ in range(options.input_len)] for _ in range(count))
        return [{"prompt": prompt, **fields} for prompt in prompts]

    def generate(requests: list[dict[str, Any]]) -> None:
        work = answer_all(offline.dispatcher, COMPLETIONS, requests, offline.concurrency, False)
        assert all(answer.error is None for answer in offline.run(work))

    def batch(source: Path) -> None:
        run_batch(offline, source)

    generate(bodies(4 * options.seqs))  # warm-up
    tokens = options.requests * options.output_len
    before, cpu_before = offline.run(offline.client.rank_stats()), cpu_seconds()
    rates: Rates = {"batch": [], "generate": []} | ({"engine": []} if alone else {})
    for _ in range(options.rounds):
        if alone is not None:
            rates["engine"].append(alone.run())
        source = write_requests(bodies(options.requests), folder)
        rates["batch"].append(timed(batch, source, tokens))
        rates["generate"].append(timed(generate, bodies(options.requests), tokens))
    after, cpu_after = offline.run(offline.client.rank_stats()), cpu_seconds()
    offline_rates = rates["batch"] + rates["generate"]
    mean = len(offline_rates) / sum(1 / rate for rate in offline_rates)
    offline_tokens = tokens * len(offline_rates)
    cpu_us = {
        name: 1e6 * (cpu_after[name] - cpu_before[name]) / offline_tokens for name in cpu_after
    }
    if alone is not None:
        cpu_us["engine"] = 1e6 * alone.cpu_s / (tokens * len(rates["engine"]))
    return rates, mean / sum(map(rate_in_steps, before, after)), cpu_us


def cpu_seconds() -> dict[str, float]:
    """CPU time of the ranks' processes, and of this process."""
    ranks = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "RankActor" in " ".join(process.cmdline()):
                times = process.cpu_times()
                ranks += times.user + times.system
    return {"ranks": ranks, "sender": time.process_time()}


def timed(work: Callable[[Any], None], requests: Any, tokens: int) -> float:
    """Output tok/s of one round."""
    started = time.perf_counter()
    work(requests)
    return round(tokens / (time.perf_counter() - started), 1)


def write_requests(requests: list[dict[str, Any]], folder: Path) -> Path:
    """Write the input of a batch."""
    lines = (
        json.dumps({"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": body})
        for i, body in enumerate(requests)
    )
    path = folder / "requests.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def run_batch(engine: OfflineEngine, source: Path) -> None:
    """A batch from file to file."""
    out = source.with_name("results.jsonl")
    out.unlink(missing_ok=True)
    output = BatchOutput(out)
    try:
        batch = BatchRun(BatchInput(source), output, Progress())
        server = LocalServer(engine.dispatcher, engine.client)
        engine.run(batch.run(server, engine.concurrency, lambda: False))
        assert batch.complete and not batch.num_errors
    finally:
        output.close()


def rate_in_steps(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Tokens of a rank over the time in its steps."""
    tokens = after["generation_tokens"] - before["generation_tokens"]
    seconds = sum(after["step_seconds"].values()) - sum(before["step_seconds"].values())
    return tokens / seconds


if __name__ == "__main__":
    main()
