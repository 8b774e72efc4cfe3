"""Times one rank's experts in one MoE layer on a GPU: route, products, sum, each backend as a CUDA graph.

    python scripts/bench_experts.py --out results.json

The shapes are Qwen3-30B-A3B's over four ranks with uniform random routing, unless told otherwise. Several layers'
weights take turns, so that none is found in the cache. Nothing is exchanged: `rows` is what comes out of the routing.
"""

import argparse
import contextlib
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels.all2all.payload import pick_local
from kernels.grouped_gemm import choice
from kernels.permute import ExpertOrder

BACKENDS = ("torch_grouped", "triton", "deepgemm", "deepgemm_fp8")
ROWS = (32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MEMORY, BF16, FP8 = 4.0e12, 750e12, 1500e12  # of one H200: bytes/s, FLOP/s
LAYERS_IN_GRAPH, REPLAYS = 9, 7


class Layers:
    """The weights of some layers in one backend's form, and one routing of rows to them."""

    def __init__(self, args: argparse.Namespace, backend: str):
        self.gemm = choice.build(backend)
        self.weights = []
        experts, hidden, width = args.local_experts, args.hidden, args.width
        for layer in range(args.layers):
            new: dict[str, Any] = {"generator": torch.Generator("cuda").manual_seed(layer)}
            w13 = torch.empty(experts, 2 * width, hidden, dtype=torch.bfloat16, device="cuda")
            w2 = torch.empty(experts, hidden, width, dtype=torch.bfloat16, device="cuda")
            w13.normal_(0, hidden**-0.5, **new)
            w2.normal_(0, width**-0.5, **new)
            self.weights.append(self.gemm.prepare(w13, w2))
        self.order = ExpertOrder(
            range(experts, 2 * experts) if args.experts > experts else range(experts),
            num_experts=args.experts,
            device="cuda",
            dtype=torch.int64,
            alignment=self.gemm.row_alignment,
        )

    def measure(self, args: argparse.Namespace, rows: int) -> dict[str, float]:
        """Microseconds of a whole layer and of its parts, and its floors."""
        num_rows = max(1, rows * args.experts // (args.top_k * args.local_experts))
        new: dict[str, Any] = {"generator": torch.Generator("cuda").manual_seed(rows)}
        x_ND = torch.randn(num_rows, args.hidden, device="cuda", **new).bfloat16()
        scores = torch.rand(num_rows, args.experts, device="cuda", **new)
        topk_idx_NK = scores.topk(args.top_k, dim=-1).indices
        weights_NK = torch.rand(num_rows, args.top_k, device="cuda", **new)
        routed = pick_local(x_ND, topk_idx_NK, weights_NK, self.order, None)
        y_RD = self.gemm(routed, *self.weights[0])

        def whole(layer: int) -> None:
            routed = pick_local(x_ND, topk_idx_NK, weights_NK, self.order, None)
            routed.handle.partial_sums(self.gemm(routed, *self.weights[layer]))

        figures = {
            "rows": int(routed.offs_e[-1]),
            "used_experts": int((routed.places().ends_e > routed.places().starts_e).sum()),
            "us": graph_us(whole, args.layers),
            "route_us": graph_us(lambda _: self.order.route(topk_idx_NK), args.layers),
            "products_us": graph_us(
                lambda layer: self.gemm(routed, *self.weights[layer]), args.layers
            ),
            "sum_us": graph_us(lambda _: routed.handle.partial_sums(y_RD), args.layers),
        }
        return figures | floors(args, figures, num_rows, fp8=self.gemm.name == "deepgemm_fp8")


def floors(
    args: argparse.Namespace, figures: dict[str, float], num_rows: int, *, fp8: bool
) -> dict[str, float]:
    """What the memory and the tensor cores need at least; rows in and out move once."""
    expert_bytes = 3 * args.hidden * args.width * (1 if fp8 else 2)
    moved = figures["used_experts"] * expert_bytes + 2 * num_rows * args.hidden * 2
    flops = figures["rows"] * 6 * args.hidden * args.width
    memory_us, compute_us = moved / MEMORY * 1e6, flops / (FP8 if fp8 else BF16) * 1e6
    return {
        "floor_us": round(max(memory_us, compute_us), 1),
        "memory_floor_us": round(memory_us, 1),
        "compute_floor_us": round(compute_us, 1),
        "tflops": round(flops / figures["us"] / 1e6, 1),
        "products_tflops": round(flops / figures["products_us"] / 1e6, 1),
    }


def graph_us(call: Callable[[int], object], num_layers: int) -> float:
    """Median microseconds of one call among LAYERS_IN_GRAPH captured ones, the layers taking turns."""
    for layer in range(num_layers):
        call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(LAYERS_IN_GRAPH):
            call(index % num_layers)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / LAYERS_IN_GRAPH)
    return round(statistics.median(times), 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="routed rows of the rank")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--local-experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=3, help="layers whose weights take turns")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    return parser.parse_args()


def main() -> None:
    args = parse()
    missing = choice.missing(torch.device("cuda"))
    results: dict[str, dict[int, dict[str, float]]] = {}
    for backend in args.backends:
        if backend in missing:
            print(f"{backend}: {missing[backend]}")
            continue
        layers = Layers(args, backend)
        results[backend] = {}
        for rows in args.rows:
            results[backend][rows] = found = layers.measure(args, rows)
            shown = "  ".join(f"{key} {value:g}" for key, value in found.items())
            print(f"{backend:14} {shown}", flush=True)
        del layers
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(report(args, results), indent=1) + "\n")


def report(args: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """What was measured, on what."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    shape = {
        key: getattr(args, key) for key in ("experts", "local_experts", "top_k", "hidden", "width")
    }
    return {
        "what": "microseconds of one rank's experts in one MoE layer, as CUDA graphs",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "hardware": torch.cuda.get_device_name(),
        "versions": versions(),
        "shape": shape,
        "ceilings": {"memory_bytes_per_s": MEMORY, "bf16_flops": BF16, "fp8_flops": FP8},
        "backends": results,
    }


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("triton", "sgl-deep-gemm"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


if __name__ == "__main__":
    main()
