"""Times steps whole and in ubatches by turns, for every exchange: what overlap gains, how much it hides.

    python -m scripts.bench.overlap --out docs/results/gpu-overlap

A process and a GPU for each rank, without Ray; new ones for each exchange, so one that is missing, fails or hangs costs
the others nothing but its time. Qwen3-30B-A3B's shapes with random weights and uniform routing, unless told otherwise.
`resident` is the same step without an exchange: the rows of all ranks lie there already, so what a step takes beyond it
is what its exchange adds. Writes OUT.json, OUT.md and OUT.png after each exchange. On a CPU it is a dry run of
itself:

    python -m scripts.bench.overlap --ranks 2 --backends torch_dist --model configs/models/demo --max-model-len 64 \\
        --prefill 32,64 --decode 4,8 --out overlap
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.all2all.allgather import AllGatherAllToAll
from kernels.all2all.base import ExpertInput
from kernels.all2all.deepep_limits import MAX_TOKENS_LOW_LATENCY
from kernels.all2all.payload import Gathered, RowFormat, permute_local
from kernels.backends import registry
from kernels.pending import Pending
from kernels.routing.permute import Permutation
from scripts.bench import ROOT, gpu_clock
from scripts.bench.overlap_report import RESIDENT, page, plot
from scripts.bench.processes import Limits, Report, add_limits, limits_from_now, run_group
from scripts.bench.results import add_options, measure_or_redraw, origin, save, write
from workers.config import RankConfig
from workers.rank import process_group
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.rank.trace_step import trace_step
from workers.ubatch.tuning import decode_context
from workers.ubatch.wrapper import alternate

BACKENDS = "copy_engine,symm,deepep,allgather,torch_dist,deepep_low_latency"
BLOCK_SIZE = 16
SWEEP_FROM = 4096  # tokens of the prefills that limits on the exchange's SMs are tried with
CLOCKED = 6  # timings of a prefill that count for nothing but clock and power
TINY_STEPS = 200  # of empty tasks, for the cost of handing over

Say = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """What the ranks of one exchange measure."""

    backend: str
    config: RankConfig
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    comm_sms: tuple[int, ...]
    repeats: int
    seconds: float


class ResidentRows(AllGatherAllToAll):
    """Rows of all ranks that lie here from the start, with experts chosen uniformly; nothing travels either way.

    The product and the sums of its rows are those of an exchange that brings every row to every rank.
    """

    max_num_tokens = num_experts = 0  # tokens of a rank, experts of all; set before any is built

    def __init__(self, group: Any, permutation: Permutation, row_format: RowFormat):
        super().__init__(group, permutation, row_format)
        self._rank = group.rank()
        self._rows: torch.Tensor | None = None

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        if self._rows is None:
            self._rows = self._draw(x_TD.device)
        rows = self._rows[: self._num_ranks * len(x_TD)]
        return Pending(
            lambda: permute_local(*self._format.fields(rows), self._permutation, len(x_TD))
        )

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        begin = self._rank * handle.origin
        own_TD = handle.partial_sums(y_RD)[begin : begin + handle.origin]
        return Pending(lambda: own_TD)

    def _draw(self, device: torch.device) -> torch.Tensor:
        """uint8 [N, W], as an all-gather would leave them."""
        num_rows, form = self._num_ranks * self.max_num_tokens, self._format
        generator = torch.Generator().manual_seed(0)
        chance = torch.rand(num_rows, self.num_experts, generator=generator)
        ids = chance.topk(form.top_k).indices.to(device)
        x = torch.randn(num_rows, form.hidden_size, dtype=form.dtype, device=device)
        return form.pack(x, ids, torch.full(ids.shape, 1 / form.top_k, device=device))


class Measurement:
    """One rank of a started group: its timer, and the slowest rank's seconds."""

    def __init__(self, task: Task, epoch: Epoch, report: Report):
        self._task, self._epoch, self._report = task, epoch, report
        self._found: dict[str, Any] = {"backends": epoch.process.selection.names()}
        runner, scheduler = epoch.runner, epoch.scheduler
        assert runner.ubatches is not None
        self._wrapper, self._limit = runner.ubatches, runner.limit_all2all
        self._timer = epoch.ubatches.timer(runner, scheduler, epoch.process.max_model_len)
        largest = epoch.ubatches.largest(scheduler, epoch.process.max_model_len)
        self._sizes = [
            (phase, size)
            for phase in ("prefill", "decode")
            for size in getattr(task, phase)
            if size <= largest[phase]
        ]
        prefills = [size for phase, size in self._sizes if phase == "prefill"]
        self._sweep = [size for size in prefills if size >= SWEEP_FROM] or prefills[-1:]

    def run(self) -> None:
        """All figures of this exchange; collective."""
        self._found["yield_ubatch"] = self._hand_over()
        exchange = self._wrapper.backends[0].all2all
        if exchange.sm_choices and self._task.backend != RESIDENT and self._sweep:
            self._found["comm_sms"] = self._try_comm_sms()
            self._found["best_comm_sms"] = self._best(self._found["comm_sms"])
            self._limit(self._found["best_comm_sms"])
        self._pairs()
        self._found["clocks"] = self._clocks()
        self._report({"found": self._found})
        prefills = [size for phase, size in self._sizes if phase == "prefill"]
        if self._task.backend != RESIDENT and prefills:
            self._found["traced"] = self._trace(max(prefills))
            self._report({"found": self._found})

    def _trace(self, num_tokens: int) -> dict[str, Any]:
        """Record a prefill of `num_tokens` and return rank 0's covered share. No step can run afterwards."""
        self._say(f"trace of a prefill of {num_tokens}")
        step = trace_step(self._epoch, "prefill", num_tokens).ubatched
        return {"phase": "prefill", "tokens": num_tokens, "covered": round(step.covered_share, 4)}

    def _clocks(self) -> dict[str, dict[str, list[dict[str, float] | None]]]:
        """The clock and power of each rank's GPU in the large prefills, by tokens and form."""
        found: dict[str, dict[str, list[dict[str, float] | None]]] = {}
        for size in self._sweep:
            for form in ("whole", "ubatched"):
                self._say(f"clock of a prefill of {size}, {form}")
                with gpu_clock.clock_samples(self._epoch.process.device) as samples:
                    for _ in range(CLOCKED):
                        self._timer("prefill", size, form == "ubatched")
                gpus = process_group.gather_objects(gpu_clock.medians(samples))
                found.setdefault(str(size), {})[form] = list(gpus)
        return found

    def _pairs(self) -> None:
        """Whole and ubatched seconds of every size, in rounds, until the time is over; reported after each."""
        pairs: dict[tuple[str, int], list[tuple[float, float]]] = {size: [] for size in self._sizes}
        end = time.monotonic() + self._task.seconds
        for turn in range(self._task.repeats):
            for phase, size in self._sizes:
                self._say(f"{phase} of {size}, round {turn + 1}")
                forms = (True, False) if turn % 2 else (False, True)
                seconds = {form: self._slowest(phase, size, form) for form in forms}
                pairs[phase, size].append((seconds[False], seconds[True]))
            self._found["steps"] = [
                {"phase": phase, "tokens": size, **_medians(found)}
                for (phase, size), found in pairs.items()
            ]
            self._report({"found": self._found})
            # Another round is for all ranks or for none.
            if any(process_group.gather_objects(time.monotonic() > end)):
                break

    def _try_comm_sms(self) -> dict[str, dict[str, float]]:
        """Milliseconds of prefills in ubatches, by tokens and limit; `none`: no limit on the exchange."""
        found: dict[str, dict[str, float]] = {str(size): {} for size in self._sweep}
        for limit in (None, *self._task.comm_sms):
            self._limit(limit)
            for size in self._sweep:
                self._say(f"{limit} SMs for the exchange at {size} tokens")
                key = "none" if limit is None else str(limit)
                found[str(size)][key] = round(1e3 * self._slowest("prefill", size, True), 3)
        return found

    def _say(self, text: str) -> None:
        self._report({"stage": text})

    def _best(self, found: dict[str, dict[str, float]]) -> int | None:
        """The limit that makes the largest of these prefills fastest."""
        figures = found[str(self._sweep[-1])]
        best = min(figures, key=lambda limit: figures[limit])
        return None if best == "none" else int(best)

    def _slowest(self, phase: str, num_tokens: int, ubatch: bool) -> float:
        """Seconds of such a step, the median of a few, on the rank where it takes longest."""
        return max(process_group.gather_objects(self._timer(phase, num_tokens, ubatch)))

    def _hand_over(self) -> dict[str, float]:
        """What turns of empty ubatches cost in a step: each waits twice a layer."""
        layers = self._epoch.process.model_config.num_layers
        num_ubatches = self._wrapper.num_ubatches

        def waits() -> None:
            for _ in range(2 * layers):
                Pending(lambda: None).wait()

        def in_turns() -> None:
            alternate([waits] * num_ubatches, self._epoch.process.device)

        def one_by_one() -> None:
            for _ in range(num_ubatches):
                waits()

        turns, plain = (_median_seconds(run) for run in (in_turns, one_by_one))
        count = 2 * layers * num_ubatches
        return {
            "layers": layers,
            "hand_overs_a_step": count,
            "us_a_hand_over": round(1e6 * (turns - plain) / count, 3),
            "ms_a_step": round(1e3 * (turns - plain), 4),
        }


def _medians(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    columns = [
        [round(1e3 * seconds, 3) for seconds in column] for column in zip(*pairs, strict=True)
    ]
    whole, ubatched = (statistics.median(column) for column in columns)
    return {
        "whole_ms": whole,
        "ubatched_ms": ubatched,
        "all_whole_ms": columns[0],
        "all_ubatched_ms": columns[1],
    }


def _median_seconds(run: Callable[[], None]) -> float:
    found = []
    for _ in range(TINY_STEPS):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def start_rank(index: int, task: Task, rendezvous: Rendezvous, say: Say) -> Epoch:
    """A rank with weights and cache; its kernels compile when they are first timed."""
    if task.config.device == "cuda":
        torch.cuda.set_device(index)
    process = RankProcess(index, task.config)
    if task.backend == RESIDENT:
        ResidentRows.max_num_tokens = task.config.scheduler.max_num_batched_tokens
        ResidentRows.num_experts = process.model_config.num_experts
        registry.ALL2ALL["allgather"] = f"{__name__}.{ResidentRows.__name__}"
    say("joining the group")
    epoch = Epoch(process, rendezvous, 60)
    say("weights")
    epoch.load()
    epoch.ubatches.tune = lambda *args, **kwargs: None  # type: ignore[method-assign] # measured here instead
    say("cache")
    epoch.size_cache()
    if epoch.graph_sizes:
        epoch.runner.make_graphs(epoch.graph_sizes)  # captured when they are first timed
    return epoch


def work(index: int, report: Report, _folder: Path, task: Task, rendezvous: Rendezvous) -> None:
    """One rank's process; rank 0 reports {"stage": text} as it goes on, and {"found": figures} after each round."""
    epoch = start_rank(index, task, rendezvous, lambda text: report({"stage": text}))
    Measurement(task, epoch, report).run()
    epoch.process.close()


def figures_of(task: Task, limits: Limits) -> dict[str, Any]:
    """What new ranks find, or {"missing": why}; with "failure" where they did not come to their end."""
    with process_group.local_rendezvous() as rendezvous:
        outcome = run_group(work, (task, rendezvous), task.config.num_ranks, limits)
    found = [report["found"] for report in outcome.reports if "found" in report]
    if not found:
        return {"missing": outcome.said()}
    return {**found[-1], "failure": outcome.failure}


def task_of(args: argparse.Namespace, backend: str) -> Task:
    """What to measure with this exchange."""
    max_tokens = max([*args.prefill, *(2 * size for size in args.decode)])
    max_num_seqs = max([*args.decode, -(-max_tokens // (args.max_model_len - 2))])
    if backend == "deepep_low_latency":
        max_tokens = min(max_tokens, MAX_TOKENS_LOW_LATENCY)
    per_decode = -(-2 * decode_context(args.max_model_len - 2) // BLOCK_SIZE)
    num_blocks = max(max_num_seqs * per_decode, 2 * max_tokens // BLOCK_SIZE) + 64
    on_gpu = args.device == "cuda"
    config = RankConfig(
        model={
            "path": str(args.model.resolve()),
            "dtype": "bfloat16" if on_gpu else "float32",
            "max_model_len": args.max_model_len,
            "weights": "dummy",
            "routing": {"kind": "uniform"},
        },
        scheduler={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_tokens,
            "cuda_graphs": {"auto": "auto", "true": True, "false": False}[args.cuda_graphs],
        },
        cache={"prefix_caching": False, "num_blocks": num_blocks, "block_size": BLOCK_SIZE},
        kernels={
            "all2all": "allgather" if backend == RESIDENT else backend,
            "grouped_gemm": args.grouped_gemm,
        },
        overlap={"mode": "on"},
        num_ranks=args.ranks,
        device=args.device,
        threads=4 if on_gpu else 1,
        vote_timeout_s=30,
    )
    sizes = tuple(args.prefill), tuple(args.decode), tuple(args.comm_sms)
    return Task(backend, config, *sizes, args.repeats, args.seconds)


def measure(args: argparse.Namespace) -> None:
    """Every exchange after the other; what there is is written after each."""
    limits = limits_from_now(args)
    report: dict[str, Any] = {
        **origin(args.ranks if args.device == "cuda" else 0, args.commit),
        "model": args.model.name,
        "ranks": args.ranks,
        "cuda_graphs": args.cuda_graphs,
        "sizes": {"prefill": args.prefill, "decode": args.decode},
        "backends": {},
    }
    for backend in (RESIDENT, *args.backends):
        started = time.monotonic()
        if started < limits.end:
            figures = figures_of(task_of(args, backend), limits)
        else:
            figures = {"missing": f"left out: {args.budget:g} s had passed"}
        figures["seconds"] = round(time.monotonic() - started, 1)
        report["backends"][backend] = figures
        print(backend, json.dumps(figures), flush=True)
        save(args.out, report)
        write(args.out, report, page, plot)


def parse() -> argparse.Namespace:
    """Options, with what depends on the machine filled in."""
    numbers = lambda text: sorted(int(part) for part in text.split(",") if part)  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backends", default=BACKENDS.split(","), type=lambda text: text.split(",")
    )
    parser.add_argument("--model", type=Path, default=ROOT / "configs" / "models" / "qwen3-30b-a3b")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--ranks", type=int, help="default: one for each GPU")
    parser.add_argument("--prefill", type=numbers, default="512,1024,2048,4096,8192")
    parser.add_argument("--decode", type=numbers, default="32,64,128,256,512")
    parser.add_argument("--comm-sms", type=numbers, default="4,8,12,16,20,24,32")
    parser.add_argument("--cuda-graphs", choices=("auto", "true", "false"), default="auto")
    parser.add_argument("--grouped-gemm", default="auto")
    parser.add_argument("--repeats", type=int, default=7, help="rounds over all sizes, at most")
    parser.add_argument("--seconds", type=float, default=18, help="after which no round is begun")
    add_limits(parser, patience_s=150, budget_s=400)  # the first run on a machine compiles
    add_options(parser)
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    args.device = "cuda" if num_gpus else "cpu"
    args.ranks = args.ranks or num_gpus
    if args.ranks < 2 and not args.redraw:
        parser.error(
            f"needs two ranks or more, found {num_gpus} GPUs; --ranks says how many to start"
        )
    return args


def main() -> None:
    """Command line."""
    measure_or_redraw(parse(), measure, page, plot)


if __name__ == "__main__":
    main()
