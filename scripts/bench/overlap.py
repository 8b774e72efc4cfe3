"""Times steps whole and in ubatches by turns, by all-to-all and grouped GEMM: what overlap gains and what it hides.

    python -m scripts.bench.overlap --out docs/results/gpu-overlap-fp8

A process and a GPU for each rank, without Ray and HTTP. Ranks keep their weights from one all-to-all to the next.
Qwen3-30B-A3B's shapes with random weights and uniform routing, unless told otherwise; `deepgemm_fp8` computes with an
FP8 checkpoint of it. `resident` is the same step without an all-to-all: the rows of all ranks lie there already, so the
time beyond it is what an all-to-all adds. Processes compile DeepGEMM's kernels before. Writes OUT.json and OUT.md. On a
CPU it is a dry run of itself:

    python -m scripts.bench.overlap --ranks 2 --all2alls torch_dist --gemms auto --model configs/models/demo \\
        --layers 2 --max-model-len 64 --prefill 32,64 --decode 4,8 --out overlap
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cluster.experiments.gpu_clock import clock_figures, clock_samples
from kernels.interface import registry
from scripts.bench import ROOT
from scripts.bench.inputs import counts, model_copy, names_of, need_gpus
from scripts.bench.overlap_kernels import COMPILERS, ResidentRows, compile_some
from scripts.bench.overlap_report import RESIDENT, page
from scripts.bench.processes import Limits, Report, add_limits, limits_from_now, run_group
from scripts.bench.results import add_options, measure_or_redraw, origin, save, write
from workers.config import RankConfig
from workers.overlap.tuning import decode_context
from workers.rank import process_group
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous

ALL2ALLS = "copy_engine,symm,deepep"
LOW_LATENCY = "deepep_low_latency"  # for decodes alone
BLOCK_SIZE = 16
CLOCKED_S = 1.6  # of steps of one form, for its clock and power
T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """What one group of processes measures: every all-to-all with one grouped GEMM, in steps of one phase."""

    gemm: str
    phase: str
    sizes: tuple[int, ...]
    all2alls: tuple[str, ...]
    comm_sms: tuple[int, ...]
    rounds: int
    clocks: bool
    config: RankConfig

    def config_of(self, all2all: str) -> RankConfig:
        """The configuration with this all-to-all."""
        name = "allgather" if all2all == RESIDENT else all2all
        kernels = self.config.kernels.model_copy(update={"all2all": name})
        return self.config.model_copy(update={"kernels": kernels})


class Measurement:
    """One all-to-all of a started group; times are the slowest rank's. All ranks call alike."""

    def __init__(self, task: Task, all2all: str, epoch: Epoch, report: Report):
        self._task, self._epoch = task, epoch
        self._all2all, self._report = all2all, report
        assert epoch.runner.ubatches is not None
        runner, scheduler = epoch.runner, epoch.scheduler
        self._ubatches = runner.ubatches
        self._timer = epoch.ubatches.timer(runner, scheduler, epoch.process.max_model_len)

    def run(self) -> None:
        """Choose the SMs, then time both forms of all sizes in rounds; report after each round."""
        sizes = self._task.sizes
        found: dict[str, Any] = {"backends": self._epoch.process.selection.names()}
        choices = self._ubatches.backends[0].all2all.sm_choices
        if choices and self._all2all != RESIDENT and self._task.comm_sms:
            found["by_comm_sms"] = self._try_comm_sms(max(sizes))
            found["comm_sms"] = self._best(found["by_comm_sms"])
            self._limit(found["comm_sms"])
        times: dict[int, dict[str, list[float]]] = {
            size: {"whole_ms": [], "ubatched_ms": []} for size in sizes
        }
        for turn in range(self._task.rounds):
            for size in sizes:
                for ubatch in (False, True) if turn % 2 else (True, False):
                    form = "ubatched_ms" if ubatch else "whole_ms"
                    times[size][form].append(self._slowest_ms(size, ubatch))
            found["steps"] = [{"tokens": size, **forms} for size, forms in times.items()]
            self._reports(found)
        if self._task.clocks:
            found["clocks"] = self._clocks(max(sizes))
            self._reports(found)

    def _try_comm_sms(self, size: int) -> dict[str, float]:
        """Milliseconds of a step in ubatches by SMs of the all-to-all."""
        found = {}
        for limit in (None, *self._task.comm_sms):
            self._limit(limit)
            found["none" if limit is None else str(limit)] = self._slowest_ms(size, True)
        return found

    def _best(self, found: dict[str, float]) -> int | None:
        best = min(found, key=lambda limit: found[limit])
        return None if best == "none" else int(best)

    def _limit(self, comm_sms: int | None) -> None:
        self._epoch.runner.limit_all2all(comm_sms)

    def _slowest_ms(self, size: int, ubatch: bool) -> float:
        self._report({"all2all": self._all2all, "stage": f"{self._task.phase} of {size}"})
        seconds = self._timer(self._task.phase, size, ubatch)
        return round(1e3 * max(_of_ranks(seconds)), 4)

    def _clocks(self, size: int) -> dict[str, list[dict[str, float]]]:
        """Clock and power of each rank's GPU in steps of this size, by form."""
        found = {}
        for form in ("whole", "ubatched"):
            seconds = _of_ranks(self._timer(self._task.phase, size, form != "whole"))
            with clock_samples(self._epoch.process.device) as samples:
                for _ in range(max(1, round(CLOCKED_S / max(seconds) / 4))):
                    self._timer(self._task.phase, size, form != "whole")
            found[form] = list(_of_ranks(clock_figures(samples)))
        return found

    def _reports(self, found: dict[str, Any]) -> None:
        self._report({"all2all": self._all2all, "found": found})


def _of_ranks(value: T) -> list[T]:
    """Return `value` of every rank: processes of this machine, started by this script."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def work(
    index: int, report: Report, _folder: Path, task: Task, meetings: Sequence[Rendezvous]
) -> None:
    """One rank's process; rank 0 reports the figures of each all-to-all as they come."""
    if task.config.device == "cuda":
        torch.cuda.set_device(index)
    process = RankProcess(index, task.config_of(task.all2alls[0]))
    for all2all, rendezvous in zip(task.all2alls, meetings, strict=True):
        started = time.perf_counter()
        report({"all2all": all2all, "stage": "start"})
        with resident_rows(process, task, all2all == RESIDENT):
            process.become(index, task.config_of(all2all))
            epoch = start(process, rendezvous)
            start_s = round(time.perf_counter() - started, 1)
            report({"all2all": all2all, "found": {"start_s": start_s}})
            Measurement(task, all2all, epoch, report).run()
            epoch.close()
    process.close()


@contextmanager
def resident_rows(process: RankProcess, task: Task, resident: bool) -> Iterator[None]:
    """Put ResidentRows in the place of `allgather`."""
    if not resident:
        yield
        return
    before = registry.ALL2ALL["allgather"]
    ResidentRows.max_num_tokens = task.config.scheduler.max_num_batched_tokens
    ResidentRows.num_experts = process.model_config.num_experts
    registry.ALL2ALL["allgather"] = f"{ResidentRows.__module__}.{ResidentRows.__name__}"
    try:
        yield
    finally:
        registry.ALL2ALL["allgather"] = before


def start(process: RankProcess, rendezvous: Rendezvous) -> Epoch:
    """A rank with weights and cache; kernels and graphs follow when a step is first timed."""
    epoch = Epoch(process, rendezvous, 60)
    epoch.load()
    epoch.ubatches.tune = lambda *args, **kwargs: None  # type: ignore[method-assign] # measured here instead
    epoch.size_cache()
    if epoch.graph_sizes:
        epoch.runner.make_graphs(epoch.graph_sizes)
    return epoch


def measure_task(task: Task, limits: Limits) -> dict[str, Any]:
    """All-to-all to figures; one that fails has {"missing": why}, and those behind it get new processes."""
    found: dict[str, Any] = {}
    left = task.all2alls
    while left and time.monotonic() < limits.end:
        with ExitStack() as stack:
            meetings = [stack.enter_context(process_group.local_rendezvous()) for _ in left]
            part = replace(task, all2alls=left)
            outcome = run_group(work, (part, meetings), task.config.num_ranks, limits)
        for report in outcome.reports:
            found.setdefault(report["all2all"], {}).update(report.get("found", {}))
        if outcome.failure is None:
            break
        failed = outcome.reports[-1]["all2all"] if outcome.reports else left[0]
        found.setdefault(failed, {})["missing"] = outcome.said()
        left = left[left.index(failed) + 1 :]
    return found


def tasks(args: argparse.Namespace, folder: Path) -> Iterator[Task]:
    """Every group of processes, the most important first."""
    for gemm in args.gemms:
        for phase in ("prefill", "decode"):
            sizes = tuple(getattr(args, phase))
            names = [name for name in args.all2alls if phase == "decode" or name != LOW_LATENCY]
            if sizes and names:
                if not (model := folder / gemm).exists():
                    fp8 = gemm == "deepgemm_fp8"
                    model_copy(args.model, model, layers=args.layers, fp8=fp8)
                config = rank_config(args, model, gemm, phase, sizes)
                yield Task(
                    gemm=gemm,
                    phase=phase,
                    sizes=sizes,
                    all2alls=(RESIDENT, *names),
                    comm_sms=tuple(args.comm_sms),
                    rounds=args.rounds,
                    clocks=args.clocks and phase == "prefill",
                    config=config,
                )


def rank_config(
    args: argparse.Namespace, model: Path, gemm: str, phase: str, sizes: Sequence[int]
) -> RankConfig:
    """The configuration of every all-to-all."""
    decodes = phase == "decode"
    max_tokens = 2 * max(sizes) if decodes else max(sizes)
    max_num_seqs = max(sizes) if decodes else -(-max_tokens // (args.max_model_len - 2))
    per_decode = -(-2 * decode_context(args.max_model_len - 2) // BLOCK_SIZE)
    num_blocks = max(max_num_seqs * per_decode, 2 * max_tokens // BLOCK_SIZE) + 64
    on_gpu = args.device == "cuda"
    return RankConfig(
        model={
            "path": str(model),
            "dtype": "bfloat16" if on_gpu else "float32",
            "max_model_len": args.max_model_len,
            "weights": "dummy",
            "routing": {"kind": "uniform"},
        },
        scheduler={"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_tokens},
        cache={"prefix_caching": False, "num_blocks": num_blocks, "block_size": BLOCK_SIZE},
        kernels={"grouped_gemm": gemm},
        overlap={"mode": "on"},
        num_ranks=args.ranks,
        device=args.device,
        threads=4 if on_gpu else 1,
        vote_timeout_s=30,
    )


def measure(args: argparse.Namespace) -> None:
    """All groups, one after the other; the figures are written after each."""
    limits = limits_from_now(args)
    report: dict[str, Any] = {
        **origin(args.ranks if args.device == "cuda" else 0, args.commit),
        "model": args.model.name,
        "layers": args.layers,
        "ranks": args.ranks,
        "groups": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks(args, Path(folder)):
            begun = time.monotonic()
            group: dict[str, Any] = {"gemm": task.gemm, "phase": task.phase, "all2alls": {}}
            if task.gemm.startswith("deepgemm") and args.device == "cuda":
                said = compile_kernels(task, limits)
                group |= {"compiling": said, "compile_s": round(time.monotonic() - begun, 1)}
            group["all2alls"] = measure_task(task, limits)
            group["seconds"] = round(time.monotonic() - begun, 1)
            report["groups"].append(group)
            print(json.dumps(group), flush=True)
            save(args.out, report)
            write(args.out, report, page)


def compile_kernels(task: Task, limits: Limits) -> str:
    """Compile the kernels of DeepGEMM for every size and number of SMs, on all cores."""
    rows = sorted({rows for size in task.sizes for rows in (size, -(-size // 2))})
    sms = (None, *task.comm_sms)
    work_of = (str(task.config.model.path), task.gemm, task.config.num_ranks, rows, sms)
    return run_group(compile_some, work_of, COMPILERS, limits).said()


def parse() -> argparse.Namespace:
    """Options, with those of the machine filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all2alls", type=names_of(registry.ALL2ALL), default=ALL2ALLS)
    gemms = ("auto", *registry.GROUPED_GEMM)
    parser.add_argument("--gemms", type=names_of(gemms), default="deepgemm_fp8")
    parser.add_argument("--model", type=Path, default=ROOT / "configs" / "models" / "qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=48, help="of the model, at most")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--ranks", type=int, help="default: one for each GPU")
    parser.add_argument("--prefill", type=counts, default="4096,8192", help="tokens of a rank")
    parser.add_argument("--decode", type=counts, default="", help="sequences of a rank")
    parser.add_argument("--comm-sms", type=counts, default="16,24,32")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clocks", action="store_true", help="of the largest prefill, both forms")
    add_limits(parser, patience_s=60, budget_s=240)
    add_options(parser)
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    args.device = "cuda" if num_gpus else "cpu"
    args.ranks = args.ranks or num_gpus
    if not args.redraw:
        _check(parser, args, num_gpus)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, num_gpus: int) -> None:
    if args.ranks < 2:
        parser.error(f"needs two ranks or more, found {num_gpus} GPUs: --ranks")
    if num_gpus:
        need_gpus(args.ranks, "--ranks")
    if not (args.prefill or args.decode):
        parser.error("nothing to measure: --prefill or --decode")
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, expected 1 or more")


def main() -> None:
    """Command line."""
    measure_or_redraw(parse(), measure, page, lambda found, out: None)


if __name__ == "__main__":
    main()
