"""How much of what the loads predict do balanced experts gain, on CPU ranks with a core each? In turns with unbalanced.

    python -m scripts.bench.balanced_ranks

Writes OUT.json. One process for each rank, without Ray and HTTP, pinned to a core of its own: ranks that share cores
hide imbalance. The model has the demo's shapes but few layers and wide experts, which take nearly all of a step; the
steps have prompts alone, because a decode reads the experts of a rank whatever their rows. The ranks count the rows of
each expert, plan a map by these loads and move the experts as a server does, there and back for each turn. Predicted is
the speed if a step took the time of the busiest rank's rows: rows of the busiest rank unbalanced over balanced.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from scripts.bench import ROOT, results
from scripts.bench.inputs import model_copy, rank_config
from scripts.bench.processes import Report, add_limits, limits_from_now, run_group
from scripts.bench.timeline import check
from scripts.bench.timeline_ranks import Loop, State, start_epoch
from workers.config import RankConfig
from workers.rank.epoch import Epoch
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import Rendezvous
from workers.specs.expert_layout import ExpertLayout, ExpertMove

MODES = ("unbalanced", "balanced")
MOVE_S = 60.0
Found = dict[str, Any]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--exponents", type=float, nargs="+", default=[1.0, 1.5], help="of zipf")
    parser.add_argument("--width", type=int, default=4096, help="of an expert")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of a rank's step")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each mode")
    parser.add_argument("--set", action="append", default=[], help="setting of the configuration")
    add_limits(parser, patience_s=300, budget_s=1200)
    results.add_options(parser, "cpu-balanced-ranks", drawn=False)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < options.ranks:
        raise SystemExit(f"needs a core for each of {options.ranks} ranks, found {len(cores)}")
    measure(options, cores[: options.ranks])


def measure(options: argparse.Namespace, cores: list[int]) -> None:
    """Run one group for each exponent, and write what all of them have found."""
    found = {**results.origin(0, options.commit), "method": __doc__, "cores": cores}
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        model = wide_model(Path(folder) / "wide", options.width, options.layers)
        found |= {"ranks": options.ranks, "tokens": options.tokens, "shape": shape_of(model)}
        found["laws"] = [_law(options, model, cores, exponent) for exponent in options.exponents]
    results.save(options.out, found)
    shown = [{k: v for k, v in law.items() if k != "turns_ms"} for law in found["laws"]]
    print(json.dumps(shown, indent=1))


def wide_model(folder: Path, width: int, layers: int) -> Path:
    """Return a copy of the demo's folder with wide experts; weights are drawn."""
    copy = model_copy(ROOT / "configs" / "models" / "demo", folder, layers=layers)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    config["moe_intermediate_size"] = width
    path.write_text(json.dumps(config))
    return copy


def shape_of(model: Path) -> Found:
    """Return the sizes by which experts take most of a step."""
    config = json.loads((model / "config.json").read_text())
    names = ("num_hidden_layers", "hidden_size", "moe_intermediate_size", "num_experts")
    return {name: config[name] for name in (*names, "num_experts_per_tok")}


def _law(options: argparse.Namespace, model: Path, cores: list[int], exponent: float) -> Found:
    overrides = [
        f"model.path={model}",
        "model.weights=dummy",
        f"model.routing={{kind: zipf, s: {exponent}}}",
        f"cluster.ranks={options.ranks}",
        "cluster.device=cpu",
        "cluster.threads_per_rank=1",
        "experts.rebalance=auto",  # makes experts movable; here no supervisor plans moves
        "overlap.mode=off",
        "cache.prefix_caching=false",
        f"scheduler.max_num_batched_tokens={options.tokens}",
        *options.set,
    ]
    config = rank_config(ROOT / "configs" / "local.yaml", overrides)
    state = State("prefill", 2, options.tokens // 2, options.tokens // 2)
    check(config, [state])
    with local_rendezvous() as rendezvous:
        task = (config, rendezvous, state, cores, options.rounds)
        outcome = run_group(run_rank, task, config.num_ranks, limits_from_now(options))
    if outcome.failure is not None:
        raise SystemExit(outcome.said())
    return law_of(exponent, [report for report in outcome.reports if "stage" not in report])


def run_rank(
    index: int,
    report: Report,
    folder: Path,
    config: RankConfig,
    rendezvous: Rendezvous,
    state: State,
    cores: list[int],
    rounds: int,
) -> None:
    """A rank's process. Rank 0 reports the prediction, and the milliseconds of a step in each turn."""
    logging.getLogger("workers").setLevel(logging.WARNING)
    epoch, _ = start_epoch(index, report, config, rendezvous)
    epoch.start_engine(lambda ingress_id, outputs: None, lambda step: None)
    os.sched_setaffinity(
        0, {cores[index]}
    )  # now, so that waits for peers spin as on a core of their own
    store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False)
    loop, maps = Loop(epoch, folder / f"trace-{index}.json"), Maps(epoch, store)
    loop.measure(state, profiled=False)  # warms up, and counts
    report({"predicted": maps.plan()})
    for turn in range(rounds):
        for mode in MODES if turn % 2 else MODES[::-1]:
            maps.use(mode, loop, state)
            loop.seed(turn)
            step_ms = loop.measure(state, profiled=False)["step_ms"]
            report({"mode": mode, "step_ms": step_ms})
            if index == 0:
                print(f"{mode}: {step_ms:.3f} ms", file=sys.stderr, flush=True)
    epoch.process.close()


class Maps:
    """The map of the start and the planned one, between which the ranks move. All ranks call it alike."""

    def __init__(self, epoch: Epoch, store: dist.TCPStore):
        self._epoch, self._store = epoch, store
        self._number = 0
        self._maps: dict[str, ExpertLayout] = {}

    def plan(self) -> float:
        """Plan a map by the rows counted so far; return the predicted speed over that of the present map."""
        process = self._epoch.process
        assert process.backends is not None and process.backends.expert_load.counts_Ls is not None
        own = process.backends.expert_load.counts_Ls.tolist()
        self._store.set(f"rows/{process.rank}", json.dumps(own))
        of_ranks = [json.loads(self._store.get(f"rows/{rank}")) for rank in process.dims.ranks()]
        present = process.experts.present.with_loads(loads_of(process.experts.present, of_ranks))
        planned = present.planned()
        self._maps = dict(zip(MODES, (present, planned), strict=True))
        return present.busiest()[0] / planned.busiest()[0]

    def use(self, mode: str, loop: Loop, state: State) -> None:
        """Move the experts into a map, beside steps."""
        epoch, wanted = self._epoch, self._maps[mode]
        move = ExpertMove.between(self._number + 1, epoch.process.experts.present, wanted)
        if move is None:
            return
        self._number += 1
        moves, deadline = epoch.engine.moves, time.monotonic() + MOVE_S
        moves.begin(move)
        while moves.number:
            assert time.monotonic() < deadline, f"a move took longer than {MOVE_S:g} s"
            loop.measure(state, profiled=False)
        assert moves.cancelled == 0, "a move was cancelled"


def loads_of(layout: ExpertLayout, of_ranks: list[list[list[int]]]) -> dict[int, list[float]]:
    """Return the rows of each expert by layer. of_ranks: the rows of each slot of a rank in each layer."""
    loads = {}
    for layer, it in layout.layers.items():
        rows = [count for own in of_ranks for count in own[layer]]
        loads[layer] = [0.0] * layout.num_experts
        for expert, count in zip(it.slots, rows, strict=True):
            loads[layer][expert] += count
    return loads


def law_of(exponent: float, reports: list[Found]) -> Found:
    """Return what one exponent gives: medians, the gain and the predicted gain, and the share of it."""
    (predicted,) = (report["predicted"] for report in reports if "predicted" in report)
    turns = {
        mode: [report["step_ms"] for report in reports if report.get("mode") == mode]
        for mode in MODES
    }
    before, after = (median(turns[mode]) for mode in MODES)
    return {
        "exponent": exponent,
        "turns_ms": turns,
        "unbalanced_ms": before,
        "balanced_ms": after,
        "gain": round(before / after - 1, 4),
        "predicted_gain": round(predicted - 1, 4),
        "share_of_predicted": round((before / after - 1) / (predicted - 1), 3),
    }


if __name__ == "__main__":
    main()
