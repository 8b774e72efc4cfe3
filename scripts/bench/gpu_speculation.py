"""Served speed on GPUs with draft tokens and without: a server for each, the same loads over HTTP, one table.

Weights are random, so drafts are accepted by given probabilities (speculation.accept_lengths). Every `--accept-lengths`
is a server of its own, and each is compared with the server without speculation:

    python -m scripts.bench.gpu_speculation --shape qwen3.6-35b-a3b --quantization fp8 --speculation mtp \\
        --accept-lengths 0.8,0.65,0.5 --accept-lengths 0.2 --out /tmp/speculation

`python -m scripts.bench.step_rows` has the time of a step by its rows. A dry run without a GPU:

    python -m scripts.make_checkpoint /tmp/glm --family glm4_moe --no-weights
    python -m scripts.bench.gpu_speculation --config configs/local.yaml --ranks 1 --set cluster.device=cpu \\
        --set model.path=/tmp/glm --set model.weights=dummy --in-flight 1,2 --lengths 16/24 --out /tmp/speculation
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench import results
from scripts.bench.gpu_serving import (
    add_server_options,
    find_ranks,
    made_at,
    model_settings,
    serve,
)
from scripts.bench.inputs import counts
from scripts.bench.results import markdown_table, origin_line
from scripts.bench.servers import resolved

IN_FLIGHT = "1,8,32,128"
LENGTHS = "512/256"
ACCEPTANCE = (0.8, 0.65, 0.5)
Server = dict[str, Any]


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
    parser.add_argument("--in-flight", type=counts, default=IN_FLIGHT, help="default: %(default)s")
    parser.add_argument("--lengths", type=lengths, default=LENGTHS, metavar="IN/OUT")
    add_server_options(parser)
    results.add_options(parser)
    options = parser.parse_args()
    find_ranks(parser, options)
    options.accept_lengths = options.accept_lengths or [ACCEPTANCE]
    # What `serve` reads.
    options.load = [(in_flight, *options.lengths) for in_flight in options.in_flight]
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


def servers(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the settings of each server by its name, the one without speculation first."""
    found = {"off": ["speculation.method=off"]}
    for accepted in options.accept_lengths:
        found[f"{options.speculation}, {' '.join(map(str, accepted))}"] = [
            f"speculation.method={options.speculation}",
            f"speculation.num_draft_tokens={options.num_draft_tokens}",
            f"speculation.accept_lengths=[{', '.join(map(str, accepted))}]",
        ]
    return found


def measure(options: argparse.Namespace, log: Path) -> None:
    """Measure all servers, and save the results behind each of them."""
    with model_settings(options) as (model, _):
        fresh = "serve.stats_fresh_s=0"  # counters at the end of a load
        settings = [f"cluster.ranks={options.ranks}", fresh, *model, *options.set]
        wanted = servers(options)
        for own in wanted.values():  # a wrong setting ends the command before a server starts
            resolved(options.config, [*settings, *own])
        report: dict[str, Any] = {}
        for name, own in wanted.items():
            print(f"{name}:", file=sys.stderr)
            own_log = log.with_suffix(f".{len(report.get('servers', ()))}.log")
            served = serve(options, [*settings, *own], own_log)
            report = report or {"method": __doc__, **made_at(options, served), "servers": {}}
            report["servers"][name] = served
            results.save(options.out, report)


def tokens_per_verification(server: Server, index: int) -> float | None:
    """Return how many tokens a sequence with drafts got in a step of this load; None without drafts."""
    ranks = server["loads"][index]["ranks"]
    drafts = sum(rank["drafts"] for rank in ranks)
    return 1 + sum(rank["accepted_tokens"] for rank in ranks) / drafts if drafts else None


def drafts_per_verification(server: Server, index: int) -> float | None:
    """Return how many drafts a sequence with drafts had in a step of this load; None without drafts."""
    ranks = server["loads"][index]["ranks"]
    drafts = sum(rank["drafts"] for rank in ranks)
    return sum(rank["draft_tokens"] for rank in ranks) / drafts if drafts else None


def page(report: dict[str, Any], _name: str) -> str:
    """All of the .md but its notes."""
    first, found = next(iter(report["servers"].values())), report["servers"]
    config, backends = first["resolved"]["config"], first["resolved"]["backends"]
    chosen = ", ".join(f"{family} {choice['name']}" for family, choice in backends.items())
    rows = [
        row
        for index in range(len(first["loads"]))
        for row in (_row(name, server, first, index) for name, server in found.items())
    ]
    head = (
        *("in flight / in / out", "drafts", "output tok/s", "x off", "per token p50 / p99 (ms)"),
        *("ms a step", "drafts of a sequence", "tokens of a sequence with drafts", "errors"),
    )
    return (
        "# Served speed with draft tokens\n\n"
        f"{origin_line(report)} {report['ranks']} rank(s). Backends: {chosen}. Model "
        f"{config['model']['path']}, weights {config['model']['weights']}; through HTTP, random prompts, answers of "
        "full length. Drafts are accepted by the given probabilities, each for a draft behind accepted drafts. The "
        "last columns count steps in which a sequence has drafts.\n\n" + markdown_table(head, rows)
    )


def _row(name: str, server: Server, off: Server, index: int) -> list[str]:
    load, without = server["loads"][index], off["loads"][index]
    result, tpot = load["result"], load["result"]["tpot_ms"]
    step_ms = max(sum(rank["ms_per_step"].values()) for rank in load["ranks"])
    ratio = result["output_tokens_per_s"] / without["result"]["output_tokens_per_s"]
    drafts, tokens = (
        count(server, index) for count in (drafts_per_verification, tokens_per_verification)
    )
    return [
        f"{load['in_flight']} / {load['input_len']} / {load['output_len']}",
        name,
        f"{result['output_tokens_per_s']:,.0f}",
        f"{ratio:.2f}",
        f"{tpot['p50']:.2f} / {tpot['p99']:.2f}",
        f"{step_ms:.2f}",
        "-" if drafts is None else f"{drafts:.2f}",
        "-" if tokens is None else f"{tokens:.2f}",
        str(sum(result["errors"].values())),
    ]


if __name__ == "__main__":
    main()
