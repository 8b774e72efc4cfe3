"""Gaps between tokens of open streams while experts move between ranks, beside the gaps while they stay.

    python -m scripts.bench.expert_moves                                    # two CPU ranks, the demo model
    python -m scripts.bench.expert_moves --share-gpu --config configs/gpu-bench.yaml --set kernels.all2all=allgather \\
        --set cache.num_blocks=4096 --set 'scheduler.cuda_graph_sizes=[8, 1024]' \\
        --out docs/results/gpu-expert-moves                                 # two ranks on one GPU

Writes OUT.json. One process for each rank, without Ray and HTTP. In a round every rank decodes a fixed number of
streams; rounds in which experts stay and rounds in which they move take turns, so a slow spell of the machine meets
both. In a round of moves the next move begins as soon as the last one has ended; each exchanges a share of every rank's
experts in all layers. A gap is the time between two tokens of a stream, as the rank publishes them.
"""

import argparse
import json
import logging
import os
import random
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cluster.config.load import load_config
from cluster.config.resolve import resolve_rank_config
from scripts.bench import ROOT, results
from scripts.bench.inputs import need_gpus, rank_config
from scripts.bench.processes import Report, add_limits, limits_from_now, run_group
from scripts.bench.timeline_ranks import start_epoch
from workers.config import RankConfig
from workers.rank.epoch import Epoch
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import Rendezvous
from workers.specs.expert_layout import ExpertLayout, ExpertMove
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams

WARM_TOKENS = 4  # of each stream, before its gaps count: other streams still have prompts
MODES = ("still", "moving")
Found = dict[str, Any]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "local.yaml")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on one GPU")
    parser.add_argument("--streams", type=int, default=8, help="of each rank")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=300, help="of a stream in a round")
    parser.add_argument("--rounds", type=int, default=6, help="of each kind")
    parser.add_argument("--share", type=float, default=0.5, help="of a rank's experts that move")
    parser.add_argument("--set", action="append", default=[], help="setting of the configuration")
    add_limits(parser, patience_s=300, budget_s=900)
    results.add_options(parser, "cpu-expert-moves", drawn=False)
    options = parser.parse_args()
    results.cuda_environment.prepare(os.environ)
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Run all rounds in processes and write what rank 0 has gathered."""
    config = _config(options)
    load = {name: getattr(options, name) for name in ("streams", "prompt", "tokens", "share")}
    with local_rendezvous() as rendezvous:
        task = (config, rendezvous, load, options.rounds)
        outcome = run_group(run_rank, task, config.num_ranks, limits_from_now(options))
    if outcome.failure is not None:
        raise SystemExit(outcome.said())
    (start,) = (report["start"] for report in outcome.reports if "start" in report)
    rounds = [report["round"] for report in outcome.reports if "round" in report]
    num_gpus = (1 if options.share_gpu else config.num_ranks) if config.device == "cuda" else 0
    found = {
        **results.origin(num_gpus, options.commit),
        "method": __doc__,
        "model": Path(config.model.path).name,
        "ranks": config.num_ranks,
        **start,
        "load": load,
        "modes": {mode: summary([it for it in rounds if it["mode"] == mode]) for mode in MODES},
    }
    found |= compared(found["modes"])
    results.save(options.out, found)
    shown = {name: found[name] for name in ("gap_p99_of_still", "longest_gap_more_ms")}
    modes = {
        mode: {k: v for k, v in it.items() if k != "rounds"} for mode, it in found["modes"].items()
    }
    print(json.dumps({**modes, **shown}, indent=1))


def _config(options: argparse.Namespace) -> RankConfig:
    overrides = [
        f"cluster.ranks={options.ranks}",
        "experts.rebalance=auto",  # makes experts movable; here no supervisor plans moves
        "model.weights=dummy",
        *options.set,
    ]
    if not options.share_gpu:
        return rank_config(options.config, overrides)
    need_gpus(1)
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return resolve_rank_config(load_config(options.config, [*overrides, "cluster.device=cuda"]))


def run_rank(
    index: int,
    report: Report,
    folder: Path,
    config: RankConfig,
    rendezvous: Rendezvous,
    load: Found,
    num_rounds: int,
) -> None:
    """A rank's process. Rank 0 reports the start and each round; its gaps are those of all ranks, which step as one."""
    logging.getLogger("workers").setLevel(logging.WARNING)
    epoch, _ = start_epoch(index, report, config, rendezvous)
    streams = Streams(epoch, load)
    info = epoch.start_engine(streams.publish, lambda step: None)
    layers = len(epoch.process.experts.present.layers)
    report({"start": {"backends": info.backends, "layers": layers}})
    for mode in MODES:  # warms up
        streams.round(mode)
    for number in range(num_rounds):
        for mode in MODES if number % 2 else MODES[::-1]:
            report({"round": {"mode": mode, **streams.round(mode)}})
    epoch.process.close()


class Streams:
    """Streams of one rank, and the moves of experts beside them. All ranks call `round` alike."""

    def __init__(self, epoch: Epoch, load: Found):
        self._epoch, self._load = epoch, load
        self._chance = random.Random(epoch.process.rank)
        self._times: dict[str, list[float]] = {}
        self._sent = self._number = 0
        self._forth = True  # whether the next move leads away from the first layout

    def publish(self, _ingress_id: str, outputs: list[RequestOutput]) -> None:
        """Note the time of each token."""
        now = time.perf_counter()
        for output in outputs:
            assert output.finish_reason in (None, "length"), output
            if output.token_ids:
                self._times[output.request_id].append(now)

    def round(self, mode: str) -> Found:
        """Decode all streams to their end; return the gaps and what has moved."""
        engine, load, moves = self._epoch.engine, self._load, self._epoch.engine.moves
        self._times, committed, cancelled = {}, moves.committed, moves.cancelled
        for _ in range(load["streams"]):
            self._send(load["tokens"])
        seconds: list[float] = []
        commits, begun, steps = [], None, 0
        running = True
        while running:
            before = moves.committed
            running, steps = engine.step().run, steps + 1
            now = time.perf_counter()
            if moves.committed != before:
                commits.append(now)
            if begun is not None and not moves.number:
                seconds.append(now - begun)
                begun = None
            # A move that begins late would not end in this round.
            if mode == "moving" and begun is None and WARM_TOKENS < steps < 0.9 * load["tokens"]:
                begun = now
                self._begin()
        self._end_move()
        assert moves.cancelled == cancelled, "a move was cancelled"
        gaps = [1e3 * (b - a) for of_one in self._times.values() for a, b in _warm(of_one)]
        return {
            "gaps_ms": [round(gap, 3) for gap in gaps],
            "commit_gaps_ms": self._gaps_at(commits),
            "moves": len(seconds),
            "move_s": [round(one, 3) for one in seconds],
            "layers_moved": moves.committed - committed,
        }

    def _send(self, tokens: int) -> None:
        self._sent += 1
        name = str(self._sent)
        self._times[name] = []
        vocab = min(256, self._epoch.process.model_config.vocab_size)
        self._epoch.engine.submit(
            EngineRequest(
                request_id=name,
                ingress_id="here",
                prompt_token_ids=[
                    self._chance.randrange(vocab) for _ in range(self._load["prompt"])
                ],
                params=SamplingParams(max_tokens=tokens, temperature=0.0),
            )
        )

    def _begin(self) -> None:
        self._number += 1
        present = self._epoch.process.experts.present
        wanted = exchanged(present, self._load["share"], forth=self._forth)
        self._forth = not self._forth
        move = ExpertMove.between(self._number, present, wanted)
        assert move is not None, "nothing moves: the share of experts is too small"
        self._epoch.engine.moves.begin(move)

    def _end_move(self) -> None:
        """Decode on, until a move that still runs has ended."""
        while self._epoch.engine.moves.number:
            times = self._times
            self._times = {}
            self._send(8)
            while self._epoch.engine.step().run:
                pass
            self._times = times

    def _gaps_at(self, moments: list[float]) -> list[float]:
        """Return the gaps of the first stream in which a layer was committed, in milliseconds."""
        of_one = next(iter(self._times.values()))
        pairs = list(_warm(of_one))
        return [round(1e3 * (b - a), 3) for a, b in pairs if any(a <= it < b for it in moments)]


def _warm(times: list[float]) -> list[tuple[float, float]]:
    return list(pairwise(times[WARM_TOKENS:]))


def exchanged(layout: ExpertLayout, share: float, *, forth: bool) -> ExpertLayout:
    """Return the layout after each rank's last slots, a `share` of them, went to the next rank (or back)."""
    num_ranks = len(layout.starts) - 1
    fewest = min(b - a for a, b in pairwise(layout.starts))
    count, found = max(1, int(share * fewest)), layout
    for layer, it in layout.layers.items():
        slots = list(it.slots)
        for rank in range(num_ranks):
            other = (rank + (1 if forth else -1)) % num_ranks
            to, start = layout.starts[other + 1], layout.starts[rank + 1]
            slots[to - count : to] = it.slots[start - count : start]
        found = found.with_slots(layer, tuple(slots))
    return found


def summary(rounds: list[Found]) -> Found:
    """Return the figures of the rounds of one kind: of all gaps together, and of each round."""
    gaps = np.concatenate([it["gaps_ms"] for it in rounds])
    commits = [gap for it in rounds for gap in it["commit_gaps_ms"]]
    found: Found = {
        "gaps": len(gaps),
        **_percentiles(gaps, "gap"),
        "moves": sum(it["moves"] for it in rounds),
        "layers_moved": sum(it["layers_moved"] for it in rounds),
    }
    if commits:
        found |= _percentiles(np.array(commits), "commit_gap")
    if seconds := [one for it in rounds for one in it["move_s"]]:
        found |= {"move_s_p50": round(median(seconds), 3), "move_s_max": max(seconds)}
    found["rounds"] = [_percentiles(np.array(it["gaps_ms"]), "gap") for it in rounds]
    return found


def _percentiles(values: np.ndarray, name: str) -> Found:
    p50, p99 = np.percentile(values, [50, 99])
    return {
        f"{name}_p50_ms": round(float(p50), 3),
        f"{name}_p99_ms": round(float(p99), 3),
        f"{name}_max_ms": round(float(values.max()), 3),
    }


def compared(modes: Found) -> Found:
    """Return moving over still: the ratio of the p99, and how much longer the longest gap is."""
    still, moving = (modes[mode] for mode in MODES)
    return {
        "gap_p99_of_still": round(moving["gap_p99_ms"] / still["gap_p99_ms"], 3),
        "longest_gap_more_ms": round(moving["gap_max_ms"] - still["gap_max_ms"], 3),
    }


if __name__ == "__main__":
    main()
