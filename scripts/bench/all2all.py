"""Times every exchange around the experts between the GPUs of this host, alone and behind the experts.

    python -m scripts.bench.all2all --out docs/results/gpu-all2all

One process per GPU, new ones for each backend: one that fails or hangs loses its own figures only, and is listed with
the reason. Shapes are Qwen3-30B-A3B's with uniform random routing, unless told otherwise. Writes OUT.json, OUT.md
and OUT.png; `--redraw` makes the page and the plot of an OUT.json again. On a CPU it is a dry run of itself over gloo:

    python -m scripts.bench.all2all --device cpu --ranks 2 --tokens 1 8 --out /tmp/dry
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll, MaskedInput
from kernels.all2all.comm_stream import CommStream
from kernels.all2all.copy_engine import KERNEL_ROWS, CopyEngineAllToAll
from kernels.all2all.payload import RowFormat, permute_local
from kernels.backends import select
from kernels.block_fp8 import BLOCK
from kernels.interface.context import BackendContext
from kernels.interface.registry import backend_class
from kernels.routing.expert_map import ContiguousMap
from kernels.routing.permute import Permutation
from scripts.bench.all2all_plan import BACKENDS, SMS_TOKENS, Part, Variant, plan, shape_of
from scripts.bench.all2all_report import LINK, add, page, plot, useful_bytes, useful_rows
from scripts.bench.processes import Report, add_limits, limits_from_now, run_group
from scripts.bench.results import add_options, measure_or_redraw, origin, save, write
from scripts.bench.timing import add_layer_options, alternate, parse_layer_options, repeated

TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192)
IN_GRAPH, ROUNDS = 6, 9


class Rank:
    """One GPU's part: its rows, and the experts that run beside the exchanges."""

    def __init__(self, args: argparse.Namespace, rank: int):
        self.args, self.rank = args, rank
        self.device = torch.device(args.device, rank if args.device == "cuda" else None)
        self.format = RowFormat(args.hidden, args.top_k, args.dtype)
        self.expert_map = ContiguousMap(args.experts, args.ranks)
        local = self.expert_map.slots_of(rank)
        self.gemm = backend_class("grouped_gemm", args.gemm)()
        self.order = Permutation(
            local,
            num_experts=args.experts,
            device=self.device,
            dtype=torch.int64,
            alignment=self.gemm.row_alignment,
            unaligned_rows=self.gemm.unaligned_rows,
        )
        new: dict[str, Any] = {"dtype": args.dtype, "device": self.device}
        self.weights = [
            torch.randn(len(local), 2 * args.width, args.hidden, **new) * args.hidden**-0.5,
            torch.randn(len(local), args.hidden, args.width, **new) * args.width**-0.5,
        ]
        self.side, self.all_sms = None, 0
        if args.device == "cuda":
            self.side = CommStream(priority=-1)
            self.all_sms = torch.cuda.get_device_properties(self.device).multi_processor_count

    def draw(self, num_tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A rank's rows, their experts and weights; the same wherever they are drawn."""
        generator = torch.Generator(self.device).manual_seed(1000 * num_tokens + rank)
        new: dict[str, Any] = {"device": self.device, "generator": generator}
        x_TD = torch.randn(num_tokens, self.args.hidden, **new).to(self.args.dtype)
        scores = torch.rand(num_tokens, self.args.experts, **new)
        topk_idx_TK = scores.topk(self.args.top_k, dim=-1).indices
        return x_TD, topk_idx_TK, torch.rand(num_tokens, self.args.top_k, **new)

    def gathered(self, num_tokens: int) -> list[torch.Tensor]:
        """All ranks' rows, experts and weights."""
        drawn = [self.draw(num_tokens, rank) for rank in range(self.args.ranks)]
        return [torch.cat(parts) for parts in zip(*drawn, strict=True)]

    def base(self, num_tokens: int) -> dict[str, float]:
        """What no exchange avoids: bytes over links, and routing and weighted sums of the gathered rows."""
        rows, starts = self.gathered(num_tokens), self.expert_map.starts
        routed = permute_local(*rows, self.order, None)
        y_RD = torch.randn_like(routed.permuted_rows())

        def here(_: int) -> None:
            permute_local(*rows, self.order, None).handle.partial_sums(y_RD)

        runs = {"here_us": repeated(here, IN_GRAPH, graph=self.args.device == "cuda")}
        each = zip(range(self.args.ranks), rows[1].chunk(self.args.ranks), strict=True)
        sent = sum(useful_rows(idx_TK, starts, rank) for rank, idx_TK in each) / self.args.ranks
        sum_bytes = self.args.hidden * self.args.dtype.itemsize
        sent_bytes = useful_bytes(sent, self.format.row_bytes, sum_bytes)
        return {
            "sent_rows": sent,
            "sent_bytes": sent_bytes,
            "floor_us": round(sent_bytes / LINK * 1e6, 3),
            **alternate(runs, self.args.rounds, IN_GRAPH, self.device),
        }

    def row_bytes(self, variant: Variant) -> int:
        """Of one row on its way to the experts."""
        if variant.gemm != "deepgemm_fp8":
            return self.format.row_bytes
        saved = self.args.hidden - 4 * (self.args.hidden // BLOCK)
        return self.format.row_bytes - saved

    def build(self, selection: select.Selection, max_num_tokens: int) -> AllToAll:
        """Collective."""
        context = BackendContext(
            shape=shape_of(self.args, max_num_tokens),
            device=self.device,
            rank=self.rank,
            group=dist.group.WORLD,
            shared_memory=None,
            expert_map=self.expert_map,
            block_size=16,
        )
        return select.build(selection, context).all2all

    def measure(self, all2all: AllToAll, variant: Variant, num_tokens: int) -> dict[str, float]:
        """Microseconds of the exchange (us), of it on its own stream (apart), of the experts, of both at once."""
        if isinstance(all2all, CopyEngineAllToAll):
            all2all.kernel_rows = -1 if variant.copies else KERNEL_ROWS
        all2all.stream = self.side if variant.copies else None
        all2all.set_num_sms(variant.num_sms)
        exchange, experts = self.exchange(all2all, num_tokens), self.experts(num_tokens)
        graph = self.in_graph(all2all)

        def apart(_: int) -> None:
            with self.aside(self.mark()):
                exchange(0)
            self.join()

        def both(_: int) -> None:
            begin = self.mark()
            if not graph:  # the host will wait for the exchange, so the experts must be under way
                experts(0)
            with self.aside(begin):
                exchange(0)
            if graph:
                experts(0)
            self.join()

        runs = {
            "us": repeated(exchange, IN_GRAPH, graph=graph),
            "gemm_us": repeated(experts, IN_GRAPH, graph=graph),
        }
        all2all.stream = self.side
        runs["apart_us"] = repeated(apart, IN_GRAPH, graph=graph)
        if variant.num_sms is not None:
            self.gemm.set_num_sms(self.all_sms - variant.num_sms)
            runs["rest_us"] = repeated(experts, IN_GRAPH, graph=graph)
        runs["both_us"] = repeated(both, IN_GRAPH, graph=graph)
        self.gemm.set_num_sms(None)
        return alternate(runs, self.args.rounds, IN_GRAPH, self.device)

    def exchange(self, all2all: AllToAll, num_tokens: int) -> Callable[[int], None]:
        """Dispatch, and combine of outputs that do not depend on it."""
        inputs = self.draw(num_tokens, self.rank)
        routed = all2all.dispatch(*inputs).wait()
        shape = (
            routed.x_eMD.shape
            if isinstance(routed, MaskedInput)
            else (routed.device_routing().num_permuted, self.args.hidden)
        )
        y = torch.randn(shape, dtype=self.args.dtype, device=self.device)
        all2all.combine(y, routed.handle).wait()

        def exchange(_: int) -> None:
            routed = all2all.dispatch(*inputs).wait()
            all2all.combine(y, routed.handle).wait()

        return exchange

    def experts(self, num_tokens: int) -> Callable[[int], None]:
        """This rank's experts of all ranks' rows, which are here already."""
        routed = permute_local(*self.gathered(num_tokens), self.order, None)

        def experts(_: int) -> None:
            self.gemm(routed, *self.weights)

        return experts

    def in_graph(self, all2all: AllToAll) -> bool:
        return self.args.device == "cuda" and all2all.graph

    def mark(self) -> torch.cuda.Event | None:
        """What the current stream was given until now."""
        return None if self.side is None else torch.cuda.current_stream().record_event()

    @contextmanager
    def aside(self, begin: torch.cuda.Event | None) -> Iterator[None]:
        """On the stream beside the current one, behind `begin`; on a CPU there is none."""
        if self.side is None or begin is None:
            yield
            return
        self.side.wait_event(begin)
        with torch.cuda.stream(self.side):
            yield

    def join(self) -> None:
        """The current stream waits for the one beside it."""
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)


def measure_backend(
    rank: int,
    report: Report,
    folder: Path,
    args: argparse.Namespace,
    parts: list[Part],
    with_base: bool,
) -> None:
    """One rank's process."""
    join_group(rank, folder, args)
    self = Rank(args, rank)
    report({"stage": "ranks are there"})
    for tokens in args.tokens if with_base else ():
        report({"base": self.base(tokens), "tokens": tokens})
    built: dict[str | None, AllToAll] = {}
    for part in parts:
        variant = part.variant
        if variant.gemm not in built:
            most = max(max(p.tokens) for p in parts if p.variant.gemm == variant.gemm)
            built[variant.gemm] = self.build(part.selection, most)
        all2all = built[variant.gemm]
        about = {"graph": self.in_graph(all2all), "row_bytes": self.row_bytes(variant)}
        report({"variant": asdict(variant), "about": about})
        for tokens in part.tokens:
            times = self.measure(all2all, variant, tokens)
            report({"variant": asdict(variant), "tokens": tokens, "times": times})
        if self.side is not None:
            torch.cuda.empty_cache()  # of graphs that are gone
    for all2all in built.values():
        all2all.close()
    dist.destroy_process_group()


def join_group(rank: int, folder: Path, args: argparse.Namespace) -> None:
    """The ranks of one backend, over files of their own."""
    store = dist.FileStore(str(folder / "store"), args.ranks)
    group: dict[str, Any] = {"store": store, "rank": rank, "world_size": args.ranks}
    if args.device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **group)
        return
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", **group, device_id=device)


def sweep(args: argparse.Namespace) -> None:
    """All backends, one after the other; the figures are saved after each."""
    begin = time.monotonic()
    limits = limits_from_now(args)
    unavailable = select.probe(args.device)
    found = about(args)
    for backend in args.backends:
        started = time.monotonic()
        parts, refused = plan(args, unavailable, backend)
        found["missing"] |= refused
        if parts:
            work = (args, parts, len(found["tokens"]) < len(args.tokens))
            outcome = run_group(measure_backend, work, args.ranks, limits)
            add(found, outcome.reports)
            if outcome.failure is not None:
                found["missing"][f"{backend}, or some of it"] = outcome.said()
            print(f"{backend}: {outcome.said()}, {time.monotonic() - started:.1f} s", flush=True)
        found["seconds"] = round(time.monotonic() - begin, 1)
        save(args.out, found)
    write(args.out, found, page, plot)
    print(args.out.with_suffix(".md").read_text(), flush=True)


def about(args: argparse.Namespace) -> dict[str, Any]:
    """What is measured, on what, and room for the results."""
    shape = {key: getattr(args, key) for key in ("hidden", "width", "experts", "top_k")}
    return {
        "what": "microseconds of dispatch and combine of one MoE layer, alone and behind its experts",
        **origin(args.ranks if args.device == "cuda" else 0, args.commit),
        "shape": shape | {"dtype": str(args.dtype)[6:]},
        "gemm": args.gemm,
        "in_graph": IN_GRAPH,
        "rounds": args.rounds,
        "link_bytes_per_s": LINK,
        "sum_bytes": args.hidden * args.dtype.itemsize,
        "sms_tokens": args.sms_tokens,
        "tokens": {},
        "backends": {},
        "missing": {},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--ranks", type=int, help="default: one per GPU of this host")
    add_layer_options(parser, tokens=TOKENS, rounds=ROUNDS)
    add_limits(parser, patience_s=40, budget_s=150)
    add_options(parser)
    args = parse_layer_options(parser)
    args.sms_tokens = SMS_TOKENS if SMS_TOKENS in args.tokens else args.tokens[-1]
    args.gemm = "triton" if args.device == "cuda" else "torch_grouped"
    if not args.redraw:
        _check_ranks(args)
    return args


def _check_ranks(args: argparse.Namespace) -> None:
    num_devices = torch.cuda.device_count() if args.device == "cuda" else args.ranks or 2
    args.ranks = args.ranks or num_devices
    if not 2 <= args.ranks <= num_devices:
        raise SystemExit(
            f"--ranks is {args.ranks}, expected 2 to the {num_devices} devices there are"
        )


def main() -> None:
    measure_or_redraw(parse(), sweep, page, plot)


if __name__ == "__main__":
    main()
