"""Gaps between tokens of open streams while experts move between ranks, beside the gaps while they stay.

    python -m scripts.bench.expert_moves                                    # two CPU ranks, the demo model
    python -m scripts.bench.expert_moves --ranks 4 --tokens 600 --config configs/gpu-bench.yaml \\
        --set cache.num_blocks=4096 --set 'scheduler.cuda_graph_sizes=[8, 1024]' \\
        --out docs/results/gpu-expert-moves-four                            # four GPUs, copies between them
    python -m scripts.bench.expert_moves --share-gpu --tokens 120 --config configs/gpu-bench.yaml \\
        --set kernels.all2all=allgather --set cache.num_blocks=4096 \\
        --set 'scheduler.cuda_graph_sizes=[8, 1024]' \\
        --out docs/results/gpu-expert-moves                                 # two ranks on one GPU

Writes OUT.json and OUT.md, also of the rounds until --budget where not all are done by then. One process for each rank,
without Ray and HTTP. In a round every rank decodes a fixed number of streams; rounds in which experts stay and rounds
in which they move take turns, so a slow spell of the machine meets both. In a round of moves the next move begins as
soon as the last one has ended; each exchanges a share of every rank's experts in all layers. A gap is the time between
two tokens of a stream, as the rank publishes them. Ranks that share a GPU take turns on it, so their gaps are longer
than those of ranks with a GPU each.
"""

import argparse
import logging
import os
import random
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

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
SHARING_NCCL = (2, 30)  # lets ranks share a GPU
WARM_UP_TOKENS = 40  # of a stream in the rounds before the first that counts
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
    results.add_options(parser, "cpu-expert-moves")
    results.measure_or_redraw(parser.parse_args(), measure, page, lambda found, path: None)


def measure(options: argparse.Namespace) -> None:
    """Run all rounds in processes and write what rank 0 has gathered; without one of each kind, end the command."""
    config = _config(options)
    load = {name: getattr(options, name) for name in ("streams", "prompt", "tokens", "share")}
    with local_rendezvous() as rendezvous:
        task = (config, rendezvous, load, options.rounds)
        outcome = run_group(run_rank, task, config.num_ranks, limits_from_now(options))
    rounds = [report["round"] for report in outcome.reports if "round" in report]
    rounds = rounds[: len(rounds) // 2 * 2]  # pairs of both kinds
    if not rounds:
        raise SystemExit(outcome.said())
    (start,) = (report["start"] for report in outcome.reports if "start" in report)
    num_gpus = (1 if options.share_gpu else config.num_ranks) if config.device == "cuda" else 0
    found = {
        **results.origin(num_gpus, options.commit),
        "method": __doc__,
        "model": Path(config.model.path).name,
        "ranks": config.num_ranks,
        **start,
        "load": load,
        "ended": outcome.failure or "complete",
        "modes": {mode: summary([it for it in rounds if it["mode"] == mode]) for mode in MODES},
    }
    found |= compared(found["modes"])
    results.save(options.out, found)
    results.write(options.out, found, page)
    print(page(found, options.out.stem), end="")
    if outcome.failure is not None:
        raise SystemExit(outcome.failure)


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
    if (found := torch.cuda.nccl.version()) < SHARING_NCCL:  # type: ignore[no-untyped-call]
        raise SystemExit(
            f"ranks share a GPU with NCCL 2.30 or newer, this is {'.'.join(map(str, found))}"
        )
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
    for mode in MODES:
        streams.round(mode, min(WARM_UP_TOKENS, load["tokens"]))
        report({"warm": mode})
    for number in range(num_rounds):
        for mode in MODES if number % 2 else MODES[::-1]:
            report({"round": {"mode": mode, **streams.round(mode, load["tokens"])}})
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

    def round(self, mode: str, tokens: int) -> Found:
        """Decode all streams to their end, so many tokens each; return the gaps and what has moved.

        move_s   of the moves that have ended before the streams
        """
        engine, load, moves = self._epoch.engine, self._load, self._epoch.engine.moves
        self._times, committed, cancelled = {}, moves.committed, moves.cancelled
        for _ in range(load["streams"]):
            self._send(tokens)
        seconds: list[float] = []
        commits, begun, steps, first = [], None, 0, self._number
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
            if mode == "moving" and begun is None and WARM_TOKENS < steps < 0.9 * tokens:
                begun = now
                self._begin()
        self._end_move()
        assert moves.cancelled == cancelled, "a move was cancelled"
        gaps = [1e3 * (b - a) for of_one in self._times.values() for a, b in _warm(of_one)]
        return {
            "gaps_ms": [round(gap, 3) for gap in gaps],
            "commit_gaps_ms": self._gaps_at(commits),
            "moves": self._number - first,
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
    p50, p99, p999 = np.percentile(values, [50, 99, 99.9])
    return {
        f"{name}_p50_ms": round(float(p50), 3),
        f"{name}_p99_ms": round(float(p99), 3),
        f"{name}_p999_ms": round(float(p999), 3),
        f"{name}_max_ms": round(float(values.max()), 3),
    }


def compared(modes: Found) -> Found:
    """Return moving over still, and the longest move.

    gap_p99_of_still            ratio of the p99 of all gaps
    gap_p99_of_still_of_pairs   median of the ratios of neighbouring rounds: a slow spell of the machine changes it less
    gap_p999_more_ms            how much longer the p99.9 of all gaps is; longest_gap_more_ms: the longest gap
    all_layers_s_max            the longest move; None if no move has ended within a round
    """
    still, moving = (modes[mode] for mode in MODES)
    p99 = [it["gap_p99_ms"] for it in (still, moving)]
    of_rounds = [[one["gap_p99_ms"] for one in it["rounds"]] for it in (still, moving)]
    ratios = [after / before for before, after in zip(*of_rounds, strict=True)]
    return {
        "gap_p99_of_still": round(p99[1] / p99[0], 3),
        "gap_p99_of_still_of_pairs": round(median(ratios), 3),
        "gap_p999_more_ms": round(moving["gap_p999_ms"] - still["gap_p999_ms"], 3),
        "longest_gap_more_ms": round(moving["gap_max_ms"] - still["gap_max_ms"], 3),
        "all_layers_s_max": moving.get("move_s_max"),
    }


def page(found: Found, name: str) -> str:
    """The gaps of both kinds of rounds, and what moves add."""
    columns = [
        ("gap_p50_ms", "median"),
        ("gap_p99_ms", "p99"),
        ("gap_p999_ms", "p99.9"),
        ("gap_max_ms", "longest"),
    ]
    lines = [
        [mode, f"{it['gaps']:,}", *(f"{it[key]:.3f}" for key, _ in columns)]
        for mode, it in found["modes"].items()
    ]
    load, moving = found["load"], found["modes"]["moving"]
    kinds = ", ".join(f"{family} {kind}" for family, kind in found["backends"].items())
    moves = "No move ended within a round."
    if "move_s_p50" in moving:
        moves = (
            f"A move of {found['layers']} layers takes {moving['move_s_p50']:.3f} s (median), "
            f"{found['all_layers_s_max']:.3f} s at most; {moving['moves']} moves."
        )
    return "\n".join(
        [
            "# Gaps between tokens while experts move",
            "",
            f"{results.origin_line(found)} {found['model']}, {found['ranks']} ranks. Backends: {kinds}.",
            f"{load['streams']} streams a rank of {load['tokens']} tokens; {load['share']:.0%} of each rank's experts "
            "move. "
            f"{len(moving['rounds'])} rounds of each kind, ended: {found['ended']}. Milliseconds:",
            "",
            results.markdown_table(["experts", "gaps", *(title for _, title in columns)], lines),
            f"- p99: {found['gap_p99_of_still']:.3f} times the gaps without moves; "
            f"median of the ratios of neighbouring rounds: {found['gap_p99_of_still_of_pairs']:.3f}",
            f"- Longest gap: {found['longest_gap_more_ms']:+.3f} ms; p99.9: {found['gap_p999_more_ms']:+.3f} ms",
            f"- {moves}",
            "",
        ]
    )


if __name__ == "__main__":
    main()
