"""Decode steps of 1, 4 and 8 sequences in the whole group, with each technique for few rows on and off.

    python -m scripts.bench.few --ranks 2 --out docs/results/gpu-few

Writes OUT.json and OUT.md. One process and GPU for each rank, without Ray and HTTP, as `scripts.bench.timeline`; ranks
without a sequence run along. Each variant captures its own CUDA graphs; the variants take turns, because clocks drift.
On a CPU it is a dry run of itself, without the techniques:

    python -m scripts.bench.few --config configs/local.yaml --ranks 2 --lengths 0.1 \\
        --set cluster.device=cpu --set model.weights=dummy --out /tmp/few
"""

import argparse
import logging
import statistics
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.bench import ROOT
from scripts.bench.inputs import names_of, rank_config
from scripts.bench.processes import Report, add_limits, limits_from_now, run_group
from scripts.bench.results import (
    add_options,
    markdown_table,
    measure_or_redraw,
    origin_line,
)
from scripts.bench.timeline import check, scaled
from scripts.bench.timeline_ranks import Loop, State, start_epoch
from scripts.bench.turns import write_turns
from workers.config import RankConfig
from workers.rank.epoch import Epoch
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import Rendezvous
from workers.runner.graph_sizes import GraphKey
from workers.step.step_sync import GraphMode
from workers.wire.request import RequestOutput

Found = dict[str, Any]
# Few graphs to capture, and steps whose sizes do not depend on measurements.
SMALL = (
    "scheduler.max_num_seqs=8",
    "scheduler.max_num_batched_tokens=1040",
    "scheduler.max_prefill_tokens_with_decodes=1040",
    "cache.num_blocks=2048",
    "overlap.mode=off",
)


class Technique:
    """Limits on rows in a module: 0 switches the technique off."""

    def __init__(self, module: str, *limits: str):
        self._module = import_module(module)
        self._first = {limit: getattr(self._module, limit) for limit in limits}

    def switch(self, *, on: bool) -> None:
        """Set the limits, or put them back to those of the module."""
        for limit, first in self._first.items():
            setattr(self._module, limit, first if on else 0)


TECHNIQUES = {
    "dependent launch": Technique("kernels.triton.pdl", "MOST_ROWS"),
    "skinny products": Technique(
        "kernels.triton.skinny_linear", "MOST_DEEP_ROWS", "MOST_SMALL_ROWS"
    ),
}
FEW = tuple(State("decode", seqs, 512, 768, of_group=True) for seqs in (1, 4, 8))
# Each is compared with the first; "all" is what serves.
VARIANTS: dict[str, tuple[str, ...]] = {
    "none": (),
    **{f"up to {name}": tuple(TECHNIQUES)[: n + 1] for n, name in enumerate(TECHNIQUES)},
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpu-bench.yaml")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", type=float, default=1.0, help="factor of tokens")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument(
        "--profiled", type=names_of(VARIANTS), default=["none", list(VARIANTS)[-1]], help="variants"
    )
    parser.add_argument("--set", action="append", default=[], help="setting of the configuration")
    add_limits(parser, patience_s=200, budget_s=300)
    add_options(parser, "gpu-few")
    measure_or_redraw(parser.parse_args(), measure, page, lambda found, path: None)


def measure(options: argparse.Namespace) -> None:
    """All states and variants, in processes; what was measured until something failed is written all the same."""
    overrides = [*SMALL, f"cluster.ranks={options.ranks}", *options.set]
    config = rank_config(options.config, overrides)
    states = [scaled(state, 1.0, options.lengths) for state in FEW]
    check(config, states)
    with local_rendezvous() as rendezvous:
        task = (config, states, rendezvous, options.rounds, options.profiled)
        outcome = run_group(run_rank, task, config.num_ranks, limits_from_now(options))
    write_turns(options, config, outcome, page, method=__doc__, name="rows", rows_of=rows_of)


def run_rank(
    index: int,
    report: Report,
    folder: Path,
    config: RankConfig,
    states: list[State],
    rendezvous: Rendezvous,
    rounds: int,
    profiled: list[str],
) -> None:
    """A rank's process. Rank 0 reports the start and each state."""
    logging.getLogger("workers").setLevel(logging.WARNING)
    set_techniques("none")
    epoch, _ = start_epoch(index, report, config, rendezvous)
    tokens: dict[str, list[int]] = {}

    def publish(ingress_id: str, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)

    info = epoch.start_engine(publish, lambda step: None)
    report({"start": {"backends": info.backends}})
    loop = Loop(epoch, folder / f"trace-{index}.json")
    graphs = Graphs(epoch, {-(-state.seqs // config.num_ranks) for state in states})
    for turn in range(rounds):
        for name in VARIANTS:
            graphs.use(name)
            for number, state in enumerate(states):
                loop.seed(number)
                tokens.clear()
                last = turn == rounds - 1 and name in profiled
                found = loop.measure(state, profiled=last)
                drawn = list(tokens.values()) if index == 0 else []
                report({"state": state.title, "variant": name, "found": found, "tokens": drawn})
                if index == 0:
                    print(f"{name}; {state.title}: {found['step_ms']:.3f} ms", file=sys.stderr)
    epoch.process.close()


class Graphs:
    """The graphs of each variant, for decodes of `rows` rows a rank; other steps have one graph for all variants."""

    def __init__(self, epoch: Epoch, rows: set[int]):
        self._graphs = epoch.runner.graphs
        if self._graphs is None:
            return
        keys = [GraphKey(GraphMode.DECODE, size) for size in rows]
        self._keys, self._of_variant = keys, {}

    def use(self, name: str) -> None:
        """Let the next steps replay the graphs of this variant. Collective."""
        set_techniques(name)
        if self._graphs is None:
            return
        if name not in self._of_variant:
            self._graphs.discard(self._keys)
            self._graphs.capture(self._keys)
            self._of_variant[name] = dict(self._graphs._graphs)
        self._graphs._graphs = dict(self._of_variant[name])


def set_techniques(name: str) -> None:
    """Switch on the techniques of a variant alone."""
    for technique, switch in TECHNIQUES.items():
        switch.switch(on=technique in VARIANTS[name])


def rows_of(reports: list[Found]) -> list[Found]:
    """One row a state, with a summary of each variant."""
    rows: dict[str, dict[str, list[Found]]] = {}
    for report in reports:
        rows.setdefault(report["state"], {}).setdefault(report["variant"], []).append(report)
    return [
        {
            "state": state,
            "variants": {
                name: {**summary([of["found"] for of in turns]), **agreement(turns, of_state)}
                for name, turns in of_state.items()
            },
        }
        for state, of_state in rows.items()
    ]


def summary(found: list[Found]) -> Found:
    """Medians of the turns, and the last profile."""
    profile = next((turn["device"] for turn in found if "device" in turn), None)
    return {
        "step_ms": round(statistics.median(turn["step_ms"] for turn in found), 4),
        "turns_ms": [turn["step_ms"] for turn in found],
        "kinds": found[-1]["kinds"],
        "host_ms": found[-1]["host_ms"],
        **({} if profile is None else {"device": profile}),
    }


def agreement(turns: list[Found], of_state: dict[str, list[Found]]) -> Found:
    """Mean number of first tokens of a sequence that equal those without any technique, and of all tokens."""
    pairs = list(zip(turns[0]["tokens"], of_state["none"][0]["tokens"], strict=False))
    equal = [
        next((at for at, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), len(pair[0]))
        for pair in pairs
    ]
    count = max(1, len(pairs))
    return {"equal_tokens": sum(equal) / count, "tokens": sum(len(a) for a, _ in pairs) / count}


def page(found: Found, name: str) -> str:
    """A table of all variants, and one of the parts of the profiled ones."""
    chosen = ", ".join(f"{family} {kind}" for family, kind in found["backends"].items())
    lines = [
        "# Few requests in flight",
        "",
        f"{origin_line(found)} {found['ranks']} rank(s). Backends: {chosen}.",
        "Milliseconds of a step on rank 0 (median of all turns), the change against `none`, and how many first tokens "
        "of a sequence equal those of `none` on average.",
        "",
        table(found["rows"]),
    ]
    for row in found["rows"]:
        lines += [f"## {row['state']}", "", parts(row["variants"])]
    return "\n".join(lines)


def table(rows: list[Found]) -> str:
    """Milliseconds of each variant by state."""
    lines = []
    for name in dict.fromkeys(name for row in rows for name in row["variants"]):
        line = [name]
        for row in rows:
            if name not in row["variants"]:
                line.append("-")
                continue
            step, first = (row["variants"][of]["step_ms"] for of in (name, "none"))
            equal = row["variants"][name]["equal_tokens"]
            line.append(f"{step:.3f} ({100 * (step / first - 1):+.1f} %), {equal:.0f}")
        lines.append(line)
    return markdown_table(["techniques", *(row["state"] for row in rows)], lines)


def parts(variants: Found) -> str:
    """Milliseconds and kernels of a step by part, of each profiled variant."""
    shown = {name: of["device"] for name, of in variants.items() if "device" in of}
    names = dict.fromkeys(part for device in shown.values() for part in device["parts"])
    lines = []
    for part in names:
        line = [part]
        for device in shown.values():
            figures = device["parts"].get(part, {"ms": 0.0, "kernels": 0.0})
            line.append(f"{figures['ms']:.3f} / {figures['kernels']:.0f}")
        lines.append(line)
    for extra in ("gaps_ms", "overlap_ms", "step_ms"):
        lines.append([extra, *(f"{device[extra]:.3f}" for device in shown.values())])
    return markdown_table(["ms / kernels", *shown], lines)


if __name__ == "__main__":
    main()
