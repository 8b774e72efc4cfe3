"""Times every exchange around the experts between the GPUs of this host, alone and behind a grouped GEMM.

    python scripts/bench_all2all.py --out docs/results/gpu-all2all

One process per GPU. The shapes are Qwen3-30B-A3B's with uniform random routing, unless told otherwise. An exchange is
dispatch and combine with all that belongs to them, the routing to places and the weighted sums included; it is a CUDA
graph where the backend allows one. Writes a JSON file, a table and a plot.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels import select
from kernels.all2all.base import AllToAll
from kernels.all2all.copy_engine import CopyEngineAllToAll
from kernels.all2all.payload import RowFormat, pick_local
from kernels.attention.base import AttentionSpec
from kernels.config import KernelsConfig
from kernels.cuda_environment import MULTICAST_OFF
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
from kernels.permute import ExpertOrder
from kernels.placement import ExpertPlacement

# `copies` is copy_engine as it is beside compute: alone, and for few rows, it takes symm's kernels.
BACKENDS = ("copy_engine", "copies", "symm", "allgather", "torch_dist", "deepep")
TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LINK = 380e9  # bytes/s out of one H200 over NVLink
IN_GRAPH, REPLAYS = 6, 11
COMM_SMS = 16  # of backends that take SMs, while a GEMM runs beside them
MIN_HIDDEN_TOKENS = 128


class Rank:
    """One GPU's part: the backends, and the experts that run beside them."""

    def __init__(self, args: argparse.Namespace, rank: int, num_ranks: int):
        self.args, self.rank, self.num_ranks = args, rank, num_ranks
        self.stream = torch.cuda.Stream(priority=-1)
        self.format = RowFormat(args.hidden, args.top_k, torch.bfloat16)
        placement = ExpertPlacement(args.experts, num_ranks)
        self.order = ExpertOrder(
            placement.local_experts(rank), num_experts=args.experts, device="cuda"
        )
        self.gemm = TritonGroupedGemm()
        self.all_sms = torch.cuda.get_device_properties().multi_processor_count
        num_local = len(placement.local_experts(rank))
        new: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.weights = (
            torch.randn(num_local, 2 * args.width, args.hidden, **new) * args.hidden**-0.5,
            torch.randn(num_local, args.hidden, args.width, **new) * args.width**-0.5,
        )
        self.context = select.KernelContext(
            device=torch.device("cuda", rank),
            dtype=torch.bfloat16,
            rank=rank,
            num_ranks=num_ranks,
            group=dist.group.WORLD,
            shared_memory=None,
            placement=placement,
            hidden_size=args.hidden,
            top_k=args.top_k,
            max_num_tokens=max(args.tokens),
            attention=AttentionSpec(1, 1, 64, 16, 1.0),
        )

    def build(self, name: str) -> AllToAll:
        """Raises KernelChoiceError where the backend cannot run."""
        config = KernelsConfig(
            all2all="copy_engine" if name == "copies" else name, grouped_gemm="triton"
        )
        selection = select.select(
            config,
            select.probe("cuda"),
            num_ranks=self.num_ranks,
            dtype=torch.bfloat16,
            hidden_size=self.args.hidden,
            expert_width=self.args.width,
            num_experts=self.args.experts,
            top_k=self.args.top_k,
            max_num_tokens=max(self.args.tokens),
        )
        all2all = select.build(selection, self.context).all2all
        if isinstance(all2all, CopyEngineAllToAll) and name == "copies":
            all2all.stream, all2all.kernel_rows = torch.cuda.Stream(priority=-1), -1
        return all2all

    def draw(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, their experts and weights."""
        new: dict[str, Any] = {
            "device": "cuda",
            "generator": torch.Generator("cuda").manual_seed(1000 * num_tokens + self.rank),
        }
        x_TD = torch.randn(num_tokens, self.args.hidden, **new).bfloat16()
        scores = torch.rand(num_tokens, self.args.experts, **new)
        return (
            x_TD,
            scores.topk(self.args.top_k, dim=-1).indices,
            torch.rand(num_tokens, self.args.top_k, **new),
        )

    def baseline(self, num_tokens: int) -> dict[str, float]:
        """What no exchange avoids: routing and weighted sums of the gathered rows."""
        drawn = [part.repeat(self.num_ranks, 1) for part in self.draw(num_tokens)]
        routed = pick_local(*drawn, self.order, None)
        y_RD = torch.randn(routed.places().num_places, self.args.hidden, device="cuda").bfloat16()

        def local() -> None:
            routed = pick_local(*drawn, self.order, None)
            routed.handle.partial_sums(y_RD)

        row = self.format.row_bytes + self.args.hidden * 2
        sent = (self.num_ranks - 1) * num_tokens * row
        return {
            "sent_bytes": sent,
            "floor_us": round(sent / LINK * 1e6, 1),
            "local_us": timed(local, graph=True),
        }

    def measure(self, all2all: AllToAll, num_tokens: int, base: dict[str, float]) -> dict[str, Any]:
        """Microseconds alone, and the share of them that disappears behind the experts of another slice."""
        inputs = self.draw(num_tokens)
        routed = all2all.dispatch(*inputs).wait()
        y_RD = torch.randn(routed.places().num_places, self.args.hidden, device="cuda").bfloat16()
        all2all.combine(y_RD, routed.handle).wait()
        places = routed.places().num_places

        def alone() -> None:
            routed = all2all.dispatch(*inputs).wait()
            all2all.combine(y_RD[:places], routed.handle).wait()

        us = timed(alone, graph=all2all.graph)
        found: dict[str, Any] = {"us": us, "gb_per_s": round(base["sent_bytes"] / us / 1e3, 1)}
        if num_tokens >= MIN_HIDDEN_TOKENS and all2all.graph:
            both, experts = self._beside_experts(all2all, num_tokens, inputs, y_RD)
            moved = (
                us - base["local_us"]
            )  # the routing and the sums are compute, whoever moves the rows
            found |= {"experts_us": experts, "both_us": both}
            found["hidden"] = round((us + experts - both) / moved, 2)
        return found

    def _beside_experts(
        self, all2all: AllToAll, num_tokens: int, inputs: Any, y_RD: torch.Tensor
    ) -> tuple[float, float]:
        """Microseconds of an exchange beside two grouped GEMMs as large as its own experts', and of these alone."""
        drawn = [part.repeat(self.num_ranks, 1) for part in inputs]
        other = pick_local(*drawn, self.order, None)

        def experts() -> None:
            self.gemm(other, *self.weights)

        def twice() -> None:
            experts()
            experts()

        def both() -> None:
            pending = all2all.dispatch(*inputs)
            experts()
            routed = pending.wait()
            returned = all2all.combine(y_RD[: routed.places().num_places], routed.handle)
            experts()
            returned.wait()

        before, all2all.stream = all2all.stream, self.stream
        if all2all.sm_choices:
            all2all.set_num_sms(COMM_SMS)
            self.gemm.set_num_sms(self.all_sms - COMM_SMS)
        beside = prepared(both, graph=True)
        if all2all.sm_choices:
            all2all.set_num_sms(None)
            self.gemm.set_num_sms(self.all_sms)
        all2all.stream = before
        both_us, experts_us = alternate(beside, prepared(twice, graph=True))
        return both_us, experts_us


def timed(call: Callable[[], object], *, graph: bool) -> float:
    """Microseconds of a call."""
    return alternate(prepared(call, graph=graph))[0]


def prepared(call: Callable[[], object], *, graph: bool) -> Callable[[], None]:
    """IN_GRAPH calls in a row, warmed up, as a CUDA graph where that is possible."""

    def calls() -> None:
        for _ in range(IN_GRAPH):
            call()

    call()
    torch.cuda.synchronize()
    if not graph:
        return calls
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        calls()
    return captured.replay


def alternate(*runs: Callable[[], None]) -> list[float]:
    """Median microseconds of one of the IN_GRAPH calls of each, the slowest rank's; they take turns: clocks drift."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(1 + REPLAYS):
        for run, found in zip(runs, times, strict=True):
            torch.cuda.synchronize()
            dist.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1000 / IN_GRAPH)
    slowest = torch.tensor([statistics.median(found[1:]) for found in times], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [round(us, 1) for us in slowest.tolist()]


def work(rank: int, args: argparse.Namespace, num_ranks: int, store: str) -> None:
    """One rank's process; rank 0 writes the results after each backend."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        device_id=torch.device("cuda", rank),
    )
    self = Rank(args, rank, num_ranks)
    bases = {tokens: self.baseline(tokens) for tokens in args.tokens}
    results: dict[str, Any] = {}
    for name in args.backends:
        try:
            all2all = self.build(name)
        except select.KernelChoiceError as error:
            results[name] = {"missing": str(error)}
            continue
        results[name] = {t: self.measure(all2all, t, bases[t]) for t in args.tokens}
        all2all.close()
        if rank == 0:
            shown = {t: list(figures.values()) for t, figures in results[name].items()}
            print(name, json.dumps(shown), flush=True)
            write(args, report(args, num_ranks, bases, results))
    dist.destroy_process_group()


def report(
    args: argparse.Namespace, num_ranks: int, bases: dict[int, Any], results: dict[str, Any]
) -> dict[str, Any]:
    """What was measured, on what."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "what": "microseconds of dispatch and combine of one MoE layer; `hidden` is the share of what moves the "
        "rows that two grouped GEMMs on another stream cover",
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or commit,
        "hardware": f"{num_ranks} x {torch.cuda.get_device_name()}",
        "versions": {
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        },
        "shape": {key: getattr(args, key) for key in ("hidden", "width", "experts", "top_k")},
        "comm_sms": COMM_SMS,
        "link_bytes_per_s": LINK,
        "tokens": bases,
        "backends": results,
    }


def write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """OUT.json, OUT.table.md and OUT.png."""
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".table.md").write_text(table(found))
    try:
        plot(found, args.out.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error} (matplotlib is in the dev extra)", flush=True)


def table(found: dict[str, Any]) -> str:
    """Markdown: us (share hidden) by tokens and backend."""
    backends = [name for name, figures in found["backends"].items() if "missing" not in figures]
    head = ["tokens a rank", "link floor", "without exchange", *backends]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for tokens, base in found["tokens"].items():
        cells = [f"{int(tokens):,}", f"{base['floor_us']:g}", f"{base['local_us']:g}"]
        best = min(found["backends"][name][tokens]["us"] for name in backends)
        for name in backends:
            figures = found["backends"][name][tokens]
            cell = f"**{figures['us']:g}**" if figures["us"] == best else f"{figures['us']:g}"
            if "hidden" in figures:
                cell += f" ({100 * figures['hidden']:.0f} %)"
            cells.append(cell)
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """Microseconds over tokens, both logarithmic, with the link's floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    tokens = [int(t) for t in found["tokens"]]
    for name, figures in found["backends"].items():
        if "missing" not in figures:
            axes.plot(tokens, [row["us"] for row in figures.values()], marker="o", ms=3, label=name)
    for key, label in (("floor_us", "link floor"), ("local_us", "without exchange")):
        axes.plot(tokens, [base[key] for base in found["tokens"].values()], "--", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens a rank", ylabel="dispatch + combine, us")
    axes.set_title(f"{found['hardware']}, hidden {found['shape']['hidden']}, bf16")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="rows of each rank")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument(
        "--commit", help="what to call the measured commit; asked from git if left out"
    )
    parser.add_argument(
        "--redraw", action="store_true", help="table and plot of OUT.json, no measuring"
    )
    parser.add_argument("--out", type=Path, required=True, help="path of the results, less suffix")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.redraw:
        write(args, json.loads(args.out.with_suffix(".json").read_text()))
        return
    num_ranks = torch.cuda.device_count()
    if num_ranks < 2:
        raise SystemExit(f"needs two GPUs or more on this host, found {num_ranks}")
    os.environ.update(MULTICAST_OFF)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(work, (args, num_ranks, store), nprocs=num_ranks)


if __name__ == "__main__":
    main()
