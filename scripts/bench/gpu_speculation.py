"""Served speed on GPUs with draft tokens and without: servers, the same loads over HTTP, one table.

Weights are random, so drafts are accepted by given probabilities (speculation.accept_lengths). `--rows` chooses:

    accept   each of `--accept-lengths` (a server of its own) at `--in-flight`
    low      0.2 of all drafts are right: drafts should be off, and cost nothing; at `--low-in-flight`
    schema   without speculation, one stream under a JSON schema beside `--beside` others, against one without

    python -m scripts.bench.gpu_speculation --shape qwen3.6-35b-a3b --quantization fp8 --speculation mtp \\
        --rows accept,low,schema --out /tmp/speculation

All rows are compared with the server without speculation, which comes first. OUT.json is written behind each load.
`python -m scripts.bench.step_rows` has the time of a step by its rows. A dry run without a GPU:

    python -m scripts.make_checkpoint /tmp/glm --family glm4_moe --no-weights
    python -m scripts.bench.gpu_speculation --config configs/local.yaml --ranks 1 --set cluster.device=cpu \\
        --set model.path=/tmp/glm --set model.weights=dummy --in-flight 1,2 --low-in-flight 2 --beside 2 \\
        --lengths 16/24 --out /tmp/speculation
"""

import argparse
import json
import re
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cluster.bench.settings import Load
from scripts.bench import results
from scripts.bench.gpu_serving import (
    add_server_options,
    find_ranks,
    made_at,
    model_settings,
    run_load,
    serve,
)
from scripts.bench.inputs import counts, names_of
from scripts.bench.results import markdown_table, origin_line
from scripts.bench.servers import ServerProcess, resolved

ROWS = ("accept", "low", "schema")
IN_FLIGHT = "1,8,32,128"
LOW_IN_FLIGHT = "8,64"
BESIDE = 63
LENGTHS = "512/256"
ACCEPTANCE = (0.8, 0.65, 0.5)
LOW = (0.2,)
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 10_000}  # no answer ends it
ALONE, PLAIN, STRUCTURED = "", "a stream", "a stream with a JSON schema"  # beside a load
STEP_TIMES = re.compile(
    r"milliseconds of a step by rows: (.*)"
)  # in the log of a start with graphs
Server = dict[str, Any]


class Wanted(NamedTuple):
    """A server to measure: its name, its settings, and its loads: requests in flight, and what runs beside them."""

    name: str
    settings: list[str]
    loads: list[tuple[int, str]]


def main() -> None:
    """Command line."""
    options = parse()
    if not options.redraw:
        with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
            measure(options, options.log or Path(folder) / "server.log")
    results.write(options.out, results.load(options.out), page)
    print(options.out.with_suffix(".md").read_text())


def parse() -> argparse.Namespace:
    """Options, with those that were left out filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speculation", choices=("ngram", "mtp", "eagle3"), default="mtp")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument(
        "--accept-lengths", action="append", type=shares, help="default: 0.8,0.65,0.5"
    )
    rows = names_of(ROWS)
    parser.add_argument("--rows", type=rows, default=",".join(ROWS), help="default: %(default)s")
    parser.add_argument("--in-flight", type=counts, default=IN_FLIGHT, help="default: %(default)s")
    parser.add_argument(
        "--low-in-flight", type=counts, default=LOW_IN_FLIGHT, help="default: %(default)s"
    )
    parser.add_argument("--beside", type=int, default=BESIDE, help="default: %(default)s")
    parser.add_argument("--lengths", type=lengths, default=LENGTHS, metavar="IN/OUT")
    add_server_options(parser)
    results.add_options(parser)
    options = parser.parse_args()
    find_ranks(parser, options)
    options.accept_lengths = options.accept_lengths or [ACCEPTANCE]
    options.tokens = options.lengths
    # What `serve` reads.
    options.loads, options.lengths, options.scale = (), 1.0, 1.0
    return options


def shares(text: str) -> tuple[float, ...]:
    """Read probabilities, as 0.8,0.65,0.5."""
    found = tuple(map(float, text.split(",")))
    if not all(0 <= share <= 1 for share in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of probabilities")
    return found


def lengths(text: str) -> tuple[int, int]:
    """Read tokens of prompts and answers, as 512/256."""
    input_len, output_len = map(int, text.split("/"))
    return input_len, output_len


def servers(options: argparse.Namespace) -> list[Wanted]:
    """Return the servers of the chosen rows, the one without speculation first."""
    accept, low = (
        options.in_flight if "accept" in options.rows else [],
        options.low_in_flight if "low" in options.rows else [],
    )
    alone = [(in_flight, ALONE) for in_flight in sorted({*accept, *low})]
    beside = [(options.beside, it) for it in (PLAIN, STRUCTURED) if "schema" in options.rows]
    found = [Wanted("off", ["speculation.method=off"], alone + beside)]
    for loads, acceptances in ((accept, options.accept_lengths), (low, [LOW])):
        for accepted in acceptances if loads else ():
            settings = [
                f"speculation.method={options.speculation}",
                f"speculation.num_draft_tokens={options.num_draft_tokens}",
                f"speculation.accept_lengths=[{', '.join(map(str, accepted))}]",
            ]
            name = f"{options.speculation}, {' '.join(map(str, accepted))}"
            found.append(Wanted(name, settings, [(in_flight, ALONE) for in_flight in loads]))
    return found


def measure(options: argparse.Namespace, log: Path) -> None:
    """Measure all servers, and save the results behind each load."""
    with model_settings(options) as (model, _):
        fresh = "serve.stats_fresh_s=0"  # counters at the end of a load
        settings = [f"cluster.ranks={options.ranks}", fresh, *model, *options.set]
        wanted = servers(options)
        for one in wanted:  # a wrong setting ends the command before a server starts
            resolved(options.config, [*settings, *one.settings])
        report: dict[str, Any] = {}
        for number, one in enumerate(wanted):
            print(f"{one.name}:", file=sys.stderr)
            own_log = log.with_suffix(f".{number}.log")
            options.load = [(in_flight, *options.tokens) for in_flight, _ in one.loads]
            beside = iter([it for _, it in one.loads])

            def save(loads: list[Any], found: Server, name: str = one.name) -> None:
                if not report:
                    report.update(method=__doc__, **made_at(options, {"resolved": found}))
                served = report.setdefault("servers", {}).setdefault(name, {})
                served.update(resolved=found, loads=loads)
                results.save(options.out, report)

            def run(
                server: ServerProcess,
                load: Load,
                found: Server,
                beside: Iterator[str] = beside,
            ) -> Server:
                kind = next(beside)
                with stream_beside(server.url, load, kind):
                    return {**run_load(server, load, found), "beside": kind}

            served = serve(options, [*settings, *one.settings], own_log, save, run)
            step_ms = STEP_TIMES.search(own_log.read_text(errors="replace"))
            report["servers"][one.name] = {**served, "step_ms": step_ms and step_ms[1]}
            results.save(options.out, report)


@contextmanager
def stream_beside(url: str, load: Load, kind: str) -> Iterator[None]:
    """Keep one more request in flight, as long as those of the load, under a JSON schema or not."""
    if kind == ALONE:
        yield
        return
    ended = threading.Event()
    errors: list[OSError] = []
    body: dict[str, Any] = {
        "prompt": [7] * load.input_len,
        "max_tokens": load.output_len,
        "temperature": 1.0,
    }
    body |= {"structured_outputs": {"json": SCHEMA}} if kind == STRUCTURED else {"ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )

    def run() -> None:
        try:
            while not ended.is_set():
                with urllib.request.urlopen(request, timeout=load.timeout_s) as answer:
                    answer.read()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise SystemExit(f"the stream beside the load failed: {errors[0]}")


def tokens_per_verification(load: dict[str, Any]) -> float | None:
    """Return how many tokens a sequence with drafts got in a step of this load; None without drafts."""
    ranks = load["ranks"]
    drafts = sum(rank["drafts"] for rank in ranks)
    return 1 + sum(rank["accepted_tokens"] for rank in ranks) / drafts if drafts else None


def drafts_per_verification(load: dict[str, Any]) -> float | None:
    """Return how many drafts a sequence with drafts had in a step of this load; None without drafts."""
    ranks = load["ranks"]
    drafts = sum(rank["drafts"] for rank in ranks)
    return sum(rank["draft_tokens"] for rank in ranks) / drafts if drafts else None


def page(report: dict[str, Any], _name: str) -> str:
    """All of the .md but its notes."""
    first, found = next(iter(report["servers"].values())), report["servers"]
    config, backends = first["resolved"]["config"], first["resolved"]["backends"]
    chosen = ", ".join(f"{family} {choice['name']}" for family, choice in backends.items())
    loads = [(name, load) for name, server in found.items() for load in server["loads"]]
    loads.sort(key=lambda one: (one[1].get("beside", ALONE) != ALONE, one[1]["in_flight"]))
    rows = [_row(name, load, first["loads"]) for name, load in loads]
    head = (
        *("in flight / in / out", "drafts", "output tok/s", "x off", "per token p50 / p99 (ms)"),
        *("ms a step", "drafts of a sequence", "tokens of a sequence with drafts", "errors"),
    )
    times = [
        f"- {name}: {server['step_ms']}\n"
        for name, server in found.items()
        if server.get("step_ms")
    ]
    measured = ["\nMilliseconds by rows, measured at the start without context:\n\n", *times]
    return (
        "# Served speed with draft tokens\n\n"
        f"{origin_line(report)} {report['ranks']} rank(s). Backends: {chosen}. Model "
        f"{config['model']['path']}, weights {config['model']['weights']}; through HTTP, random prompts, answers of "
        "full length. Drafts are accepted by the given probabilities, each for a draft behind accepted drafts. The "
        "last columns count steps in which a sequence has drafts.\n\n"
        + markdown_table(head, rows)
        + "".join(measured if times else ())
    )


def _row(name: str, load: dict[str, Any], off: list[dict[str, Any]]) -> list[str]:
    beside = load.get("beside", ALONE)
    against = PLAIN if beside == STRUCTURED else beside
    without = next(
        (
            one["result"]["output_tokens_per_s"]
            for one in off
            if one["in_flight"] == load["in_flight"] and one.get("beside", ALONE) == against
        ),
        None,
    )
    result, tpot = load["result"], load["result"]["tpot_ms"]
    step_ms = max(sum(rank["ms_per_step"].values()) for rank in load["ranks"])
    rate = result["output_tokens_per_s"]
    drafts, tokens = drafts_per_verification(load), tokens_per_verification(load)
    more = f" + {beside}" if beside else ""
    return [
        f"{load['in_flight']}{more} / {load['input_len']} / {load['output_len']}",
        name,
        f"{rate:,.0f}",
        "-" if without is None else f"{rate / without:.2f}",
        f"{tpot['p50']:.2f} / {tpot['p99']:.2f}",
        f"{step_ms:.2f}",
        "-" if drafts is None else f"{drafts:.2f}",
        "-" if tokens is None else f"{tokens:.2f}",
        str(sum(result["errors"].values())),
    ]


if __name__ == "__main__":
    main()
