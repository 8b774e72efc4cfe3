"""What a map of experts and the counts of their rows cost in a step where routing is even: on against off, in turns.

    python -m scripts.bench.expert_cost --out docs/results/gpu-expert-cost

Writes OUT.json and OUT.md. One process and GPU for each rank, without Ray and HTTP; the states are those of
`scripts.bench.timeline`. On: each layer looks its slots up in a table, as ranks do whose experts may move, and the rows
of each expert are added up in each step. Off: slots are experts, and nothing is counted. Both have CUDA graphs of their
own. On a CPU it is a dry run of itself:

    python -m scripts.bench.expert_cost --config configs/local.yaml --scale 0.05 --lengths 0.05 \\
        --set cluster.device=cpu --set model.weights=dummy --set model.routing.kind=uniform --out /tmp/cost
"""

import argparse
import logging
import sys
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench import ROOT
from scripts.bench.inputs import rank_config
from scripts.bench.processes import Report, add_limits, limits_from_now, run_group
from scripts.bench.results import (
    add_options,
    markdown_table,
    measure_or_redraw,
    origin_line,
)
from scripts.bench.timeline import STATES, check, read_state, scaled
from scripts.bench.timeline_ranks import Loop, State, start_epoch
from scripts.bench.turns import write_turns
from workers.config import RankConfig
from workers.layers.moe import StagedMap
from workers.rank.epoch import Epoch
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import Rendezvous

VARIANTS = ("off", "on")
Found = dict[str, Any]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpu-bench.yaml")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of sequences a rank")
    parser.add_argument("--lengths", type=float, default=1.0, help="factor of their tokens")
    parser.add_argument("--state", action="append", default=[], type=read_state, help="as timeline")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each variant")
    parser.add_argument("--set", action="append", default=[], help="setting of the configuration")
    add_limits(parser, patience_s=300, budget_s=570)
    add_options(parser, "gpu-expert-cost")
    measure_or_redraw(parser.parse_args(), measure, page, lambda found, path: None)


def measure(options: argparse.Namespace) -> None:
    """All states and both variants, in processes; what was measured until something failed is written all the same."""
    states = [scaled(it, options.scale, options.lengths) for it in options.state or STATES]
    sizes = sorted({state.tokens for state in states})
    overrides = [
        f"cluster.ranks={options.ranks}",
        "overlap.mode=off",
        "cache.prefix_caching=false",  # both variants compute the same prompts
        f"scheduler.cuda_graph_sizes={sizes}",  # few, because each variant captures its own
        *options.set,
    ]
    config = rank_config(options.config, overrides)
    check(config, states)
    with local_rendezvous() as rendezvous:
        task = (config, states, rendezvous, options.rounds)
        outcome = run_group(run_rank, task, config.num_ranks, limits_from_now(options))
    write_turns(options, config, outcome, page, method=__doc__, name="states", rows_of=rows_of)


def run_rank(
    index: int,
    report: Report,
    folder: Path,
    config: RankConfig,
    states: list[State],
    rendezvous: Rendezvous,
    rounds: int,
) -> None:
    """A rank's process. Rank 0 reports the start and each state of each turn."""
    logging.getLogger("workers").setLevel(logging.WARNING)
    epoch, _ = start_epoch(index, report, config, rendezvous)
    info = epoch.start_engine(lambda ingress_id, outputs: None, lambda step: None)
    report({"start": {"backends": info.backends}})
    loop, switch = Loop(epoch, folder / f"trace-{index}.json"), Switch(epoch)
    for turn in range(rounds):
        for name in VARIANTS if turn % 2 else VARIANTS[::-1]:
            switch.use(name)
            for number, state in enumerate(states):
                loop.seed(number)
                step_ms = loop.measure(state, profiled=False)["step_ms"]
                report({"state": state.title, "variant": name, "step_ms": step_ms})
                if index == 0:
                    print(f"{name}; {state.title}: {step_ms:.3f} ms", file=sys.stderr)
    epoch.process.close()


class Switch:
    """Turns the tables of all layers and the counts of a rank on and off, with graphs of either. Collective."""

    def __init__(self, epoch: Epoch):
        process = epoch.process
        assert process.model is not None and process.backends is not None
        self._process, self._graphs = process, epoch.runner.graphs
        self._blocks = process.model.moe_blocks()
        self._load = process.backends.expert_load
        self._counts, experts = self._load.counts_Ls, process.experts.map
        self._maps = {
            layer: StagedMap.of(experts.experts(layer), experts, process.rank, process.device)
            for layer in self._blocks
        }
        self._captured: dict[str, Any] = {}

    def use(self, name: str) -> None:
        """Let the next steps run as this variant."""
        on = name == "on"
        for layer, block in self._blocks.items():
            staged = self._maps[layer]
            block.table = staged.table if on else None
            block.experts_e = staged.experts_e if on else None
        self._load.counts_Ls = self._counts if on else None
        if self._graphs is None:
            return
        if name not in self._captured:
            keys = sorted(self._graphs.captured())
            self._graphs.discard(keys)
            self._graphs.capture(keys)
            self._captured[name] = dict(self._graphs._graphs)
        self._graphs._graphs = dict(self._captured[name])


def rows_of(turns: list[Found]) -> list[Found]:
    """Return the medians of each state, and the speed with map and counts as a share of that without."""
    rows: dict[str, dict[str, list[float]]] = {}
    for turn in turns:
        of_state = rows.setdefault(turn["state"], {name: [] for name in VARIANTS})
        of_state[turn["variant"]].append(turn["step_ms"])
    found = []
    for state, of_state in rows.items():
        row: Found = {"state": state, "turns_ms": of_state}
        if all(of_state.values()):
            off, on = (median(of_state[name]) for name in VARIANTS)
            row |= {"off_ms": off, "on_ms": on, "on_over_off": round(off / on, 4)}
        found.append(row)
    return found


def page(found: Found, name: str) -> str:
    """A table of all states."""
    chosen = ", ".join(f"{family} {kind}" for family, kind in found["backends"].items())
    lines = [
        [
            row["state"],
            f"{row['off_ms']:.3f}",
            f"{row['on_ms']:.3f}",
            f"{row['on_over_off']:.3f}",
        ]
        for row in found["states"]
        if "on_ms" in row
    ]
    head = ["state", "ms a step without map and counts", "with both", "speed"]
    return "\n".join(
        [
            "# Cost of a map of experts and of counting their rows",
            "",
            f"{origin_line(found)} {found['model']}, {found['ranks']} rank(s). Backends: {chosen}.",
            "Medians of all turns; the speed with both is a share of that without.",
            "",
            markdown_table(head, lines),
        ]
    )


if __name__ == "__main__":
    main()
