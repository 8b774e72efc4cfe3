"""Times one rank's experts in one MoE layer on one GPU: every grouped GEMM, by tokens per expert.

    python -m scripts.bench.experts --out docs/results/gpu-experts

A process of its own for each backend: one that fails or hangs loses its own figures only, and is listed with the
reason. What compiles is compiled by many processes before. Shapes are Qwen3-30B-A3B's over four ranks with uniform
random routing, unless told otherwise; nothing is exchanged. Writes OUT.json, OUT.md and OUT.png; `--redraw` makes the
page and the plot of an OUT.json again. On a CPU it is a dry run of itself:

    python -m scripts.bench.experts --device cpu --tokens 1 8 --out /tmp/dry
"""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kernels.all2all.base import MaskedInput
from kernels.all2all.deepep_limits import MAX_TOKENS_LOW_LATENCY, low_latency_rows
from kernels.all2all.payload import permute_local
from kernels.backends.select import probe
from kernels.block_fp8 import quantise_blocks
from kernels.grouped_gemm.base import GroupedGemm
from kernels.interface.backend import BackendShape
from kernels.interface.registry import backend_class
from kernels.routing.permute import Permutation
from scripts.bench.experts_report import BF16, FP8, MEMORY, add, page, plot
from scripts.bench.inputs import need_gpus
from scripts.bench.processes import Limits, Report, add_limits, limits_from_now, run_group
from scripts.bench.results import add_options, measure_or_redraw, origin, save, write
from scripts.bench.timing import add_layer_options, alternate, parse_layer_options, repeated

BACKENDS = ("triton", "deepgemm", "deepgemm_fp8", "torch_grouped", "reference")
TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192)
IN_GRAPH, ROUNDS = 9, 7
COMPILERS = 16  # processes
COMPILE_S = 45  # after which the measuring begins all the same


class Layers:
    """The weights of some layers in one backend's form, on one device."""

    def __init__(self, args: argparse.Namespace, backend: str, *, filled: bool = True):
        self.args, self.gemm = args, backend_class("grouped_gemm", backend)()
        self.device = torch.device(args.device)
        experts, hidden, width = args.local_experts, args.hidden, args.width
        new: dict[str, Any] = {"dtype": args.dtype, "device": self.device}
        self.weights = []
        for _ in range(args.layers if filled else 0):
            w13 = torch.randn(experts, 2 * width, hidden, **new) * hidden**-0.5
            w2 = torch.randn(experts, hidden, width, **new) * width**-0.5
            if self.gemm.fp8_weights:
                w13, w2 = quantise_blocks(w13), quantise_blocks(w2)
            self.weights.append((w13, w2))
        if not filled:
            w13 = self.gemm.empty_weights(experts, 2 * width, hidden, **new)
            self.weights.append((w13, self.gemm.empty_weights(experts, hidden, width, **new)))
        self.order = Permutation(
            range(experts),
            num_experts=args.experts,
            device=self.device,
            dtype=torch.int64,
            alignment=self.gemm.row_alignment,
            unaligned_rows=self.gemm.unaligned_rows,
        )

    def draw(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of all ranks with num_tokens each, their experts and weights."""
        num_rows = num_tokens * (self.args.experts // self.args.local_experts)
        generator = torch.Generator(self.device).manual_seed(num_tokens)
        new: dict[str, Any] = {"device": self.device, "generator": generator}
        x_ND = torch.randn(num_rows, self.args.hidden, **new).to(self.args.dtype)
        topk = torch.rand(num_rows, self.args.experts, **new).topk(self.args.top_k, dim=-1)
        return x_ND, topk.indices, torch.rand(num_rows, self.args.top_k, **new)

    def products(self, num_tokens: int, layout: str) -> Callable[[int], torch.Tensor]:
        """Calls the product of one layer or another on the same rows."""
        routed = permute_local(*self.draw(num_tokens), self.order, None)
        rows: Any = routed
        if layout == "masked":
            rows = self.masked(
                num_tokens, routed.device_routing().ends_e - routed.device_routing().starts_e
            )
        return lambda index: self.gemm(rows, *self.weights[index % len(self.weights)])

    def masked(self, num_tokens: int, counts_e: torch.Tensor) -> MaskedInput:
        """Rows as the low-latency exchange brings them."""
        args, experts = self.args, self.args.local_experts
        ranks = args.experts // experts
        room = ranks * low_latency_rows(num_tokens)
        x = torch.randn(experts * room, args.hidden, device=self.device).to(args.dtype)
        scale_eMS = None
        if self.gemm.masked_fp8:
            from kernels.triton.scatter_fp8 import scatter_fp8

            place_R1 = torch.arange(len(x), dtype=torch.int32, device=self.device).unsqueeze(1)
            x, scale_RS = scatter_fp8(x, place_R1, len(x))
            scales = scale_RS.t().reshape(-1, experts, room)
            scale_eMS = scales.transpose(0, 1).contiguous().transpose(1, 2)
        expected = max(1, ranks * num_tokens * args.top_k // args.experts)
        x_eMD = x.view(experts, room, args.hidden)
        return MaskedInput(x_eMD, scale_eMS, counts_e.to(torch.int32), expected, None)

    def measure(self, num_tokens: int, layout: str) -> dict[str, Any]:
        """Microseconds of a layer and of its parts, and how many rows and experts took part."""
        drawn = self.draw(num_tokens)
        routed = permute_local(*drawn, self.order, None)
        products = self.products(num_tokens, layout)

        def whole(index: int) -> None:
            routed = permute_local(*drawn, self.order, None)
            weights = self.weights[index % len(self.weights)]
            routed.handle.partial_sums(self.gemm(routed, *weights))

        calls: dict[str, Callable[[int], object]] = {"products_us": products}
        if layout == "contiguous":
            y_RD = products(0)
            calls["us"] = whole
            calls["route_us"] = lambda _: self.order.route(drawn[1])
            calls["sum_us"] = lambda _: routed.handle.partial_sums(y_RD)
        graph = self.in_graph
        runs = {name: repeated(call, IN_GRAPH, graph=graph) for name, call in calls.items()}
        places = routed.device_routing()
        return {
            "rows": int(routed.offs_e[-1]),
            "used_experts": int((places.ends_e > places.starts_e).sum()),
            "times": alternate(runs, self.args.rounds, IN_GRAPH, self.device),
        }

    @property
    def in_graph(self) -> bool:
        return self.args.device == "cuda" and self.gemm.graph


@torch.inference_mode()
def measure_backend(
    rank: int, report: Report, folder: Path, args: argparse.Namespace, backend: str
) -> None:
    """The process of one backend."""
    layers = Layers(args, backend)
    for layout in layers.gemm.layouts:
        name = variant(backend, layout)
        about = {"fp8": layers.gemm.fp8_weights, "graph": layers.in_graph, "layout": layout}
        report({"variant": name, "about": about})
        for tokens in sizes(args, layout):
            report({"variant": name, "tokens": tokens, **layers.measure(tokens, layout)})


@torch.inference_mode()
def compile_some(
    rank: int,
    report: Report,
    folder: Path,
    args: argparse.Namespace,
    tasks: list[tuple[str, str, int]],
) -> None:
    """Run some products once each, so that what they compile is found on disk; failures are found again later."""
    for backend, layout, tokens in tasks[rank :: min(COMPILERS, len(tasks))]:
        try:
            Layers(args, backend, filled=False).products(tokens, layout)(0)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{backend}, {layout}, {tokens} tokens: {error!r}", flush=True)


def variant(backend: str, layout: str) -> str:
    return backend if layout == "contiguous" else f"{backend} {layout}"


def sizes(args: argparse.Namespace, layout: str) -> list[int]:
    """Tokens of a rank; masked rows are as many as an exchange brings of them."""
    return [n for n in args.tokens if layout == "contiguous" or n <= MAX_TOKENS_LOW_LATENCY]


def plan(
    args: argparse.Namespace, unavailable: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The backends that can run; and those that cannot, to why. `unavailable` is from `probe`."""
    able: list[str] = []
    refused: dict[str, str] = {}
    shape = BackendShape(
        device=args.device,
        dtype=args.dtype,
        num_ranks=1,
        hidden_size=args.hidden,
        moe_intermediate_size=args.width,
        num_experts=args.experts,
        top_k=args.top_k,
        max_num_tokens=max(args.tokens),
    )
    for backend in args.backends:
        gemm: type[GroupedGemm] = backend_class("grouped_gemm", backend)
        reason = unavailable.get(f"grouped_gemm.{backend}") or gemm.unsupported_reason(shape)
        if reason is not None:
            refused[backend] = reason
            continue
        able.append(backend)
        too_many = [n for n in args.tokens if n not in sizes(args, "masked")]
        if "masked" in gemm.layouts and too_many:
            which = ", ".join(f"{n:,}" for n in too_many)
            refused[f"{variant(backend, 'masked')} with {which} tokens"] = (
                f"the exchange that brings masked rows takes {MAX_TOKENS_LOW_LATENCY:,} of a rank"
            )
    return able, refused


def sweep(args: argparse.Namespace) -> None:
    """All backends, one after the other; the figures are saved after each."""
    begin = time.monotonic()
    limits = limits_from_now(args)
    found = about(args)
    able, found["missing"] = plan(args, probe(args.device))
    if args.device == "cuda":
        compile_all(args, able)
        print(f"compiled, {time.monotonic() - begin:.1f} s", flush=True)
    for backend in able:
        started = time.monotonic()
        outcome = run_group(measure_backend, (args, backend), 1, limits)
        add(found, outcome.reports)
        if outcome.failure is not None:
            found["missing"][f"{backend}, or some of it"] = outcome.said()
        print(f"{backend}: {outcome.said()}, {time.monotonic() - started:.1f} s", flush=True)
        found["seconds"] = round(time.monotonic() - begin, 1)
        save(args.out, found)
    save(args.out, found)
    write(args.out, found, page, plot)
    print(args.out.with_suffix(".md").read_text(), flush=True)


def compile_all(args: argparse.Namespace, backends: list[str]) -> None:
    """One process compiles one kernel after the other: so several, with different sizes."""
    tasks = [
        (backend, layout, tokens)
        for backend in backends
        for layout in backend_class("grouped_gemm", backend).layouts
        for tokens in sizes(args, layout)
        if backend_class("grouped_gemm", backend).devices == ("cuda",)
    ]
    if tasks:
        limits = Limits(COMPILE_S, time.monotonic() + COMPILE_S)
        run_group(compile_some, (args, tasks), min(COMPILERS, len(tasks)), limits)


def about(args: argparse.Namespace) -> dict[str, Any]:
    """What is measured, on what, and room for the results."""
    names = ("experts", "local_experts", "top_k", "hidden", "width")
    return {
        "what": "microseconds of one rank's experts in one MoE layer",
        **origin(1 if args.device == "cuda" else 0, args.commit),
        "shape": {name: getattr(args, name) for name in names},
        "dtype": str(args.dtype)[6:],
        "in_graph": IN_GRAPH,
        "rounds": args.rounds,
        "layers": args.layers,
        "ceilings": {"memory_bytes_per_s": MEMORY, "bf16_flops": BF16, "fp8_flops": FP8},
        "tokens": args.tokens,
        "backends": {},
        "missing": {},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--local-experts", type=int, default=32, help="of one rank")
    parser.add_argument("--layers", type=int, default=3, help="layers whose weights take turns")
    add_layer_options(parser, tokens=TOKENS, rounds=ROUNDS)
    add_limits(parser, patience_s=40, budget_s=90)
    add_options(parser)
    args = parse_layer_options(parser)
    if args.device == "cuda" and not args.redraw:
        need_gpus(1, "--device cpu is a dry run")
    return args


def main() -> None:
    measure_or_redraw(parse(), sweep, page, plot)


if __name__ == "__main__":
    main()
