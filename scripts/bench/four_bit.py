"""Times the experts' products with weights in four bits beside bfloat16 and FP8, on one GPU that holds all experts.

    python -m scripts.bench.four_bit --out /tmp/four-bit

Shapes and formats are those of Qwen3-30B-A3B (int4, groups of 128) and gpt-oss-120b (MXFP4, with biases); routing is
uniform and random, nothing is exchanged. Prints the share of the floor that each product reaches: the bytes of the
experts that have rows, in the product's own format, over the memory's rate, or the FLOPs over the rate of the tensor
cores. With --tiles each product of `triton_four_bit` is also timed alone for each of TILES. Writes OUT.json. On a CPU
it is a dry run of itself:

    python -m scripts.bench.four_bit --device cpu --models tiny --rows 1 8 --out /tmp/dry
"""

import argparse
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput
from kernels.all2all.payload import permute_local
from kernels.backends.select import probe
from kernels.block_fp8 import BlockWeights
from kernels.four_bit import FourBitWeights
from kernels.four_bit_format import FourBitFormat
from kernels.grouped_gemm.base import Biases, GroupedGemm
from kernels.host import cuda_environment
from kernels.interface.backend import BackendShape
from kernels.interface.registry import backend_class
from kernels.routing.permute import Permutation
from scripts.bench.inputs import need_gpus
from scripts.bench.results import Found, add_options, markdown_table, origin, origin_line, save
from scripts.bench.roofline import Hardware
from scripts.bench.timing import alternate, repeated

ROWS = (1, 8, 32, 128, 1024)
BACKENDS = {
    "cuda": ("triton_four_bit", "triton", "deepgemm_fp8"),
    "cpu": ("native_four_bit", "native"),
}
# Rows, columns, warps, stages, programs on an SM, blocks of a stage and most parts of the depth of tiles to compare.
TILES = (
    (16, 64, 4, 5, 3, 2, 1),
    (16, 64, 4, 5, 3, 2, 4),
    (16, 64, 4, 5, 3, 1, 4),
    (16, 64, 4, 4, 4, 2, 4),
    (16, 64, 4, 5, 4, 1, 4),
    (16, 64, 4, 8, 2, 1, 4),
    (16, 64, 4, 4, 3, 3, 4),
    (16, 128, 8, 4, 2, 2, 4),
    (16, 128, 4, 5, 3, 1, 4),
    (16, 64, 4, 5, 4, 1, 1),
    (16, 64, 4, 4, 4, 2, 1),
    (16, 64, 4, 3, 3, 3, 1),
    (16, 64, 4, 3, 3, 4, 1),
    (16, 128, 4, 4, 3, 1, 1),
    (16, 128, 4, 6, 3, 1, 1),
    (16, 128, 4, 4, 2, 2, 1),
    (16, 128, 8, 4, 2, 2, 1),
    (32, 64, 4, 4, 3, 1, 1),
    (32, 64, 4, 3, 3, 2, 1),
    (32, 128, 4, 4, 2, 1, 1),
    (32, 128, 8, 4, 2, 1, 1),
    (64, 64, 4, 4, 2, 1, 1),
    (64, 64, 4, 3, 2, 2, 1),
    (64, 128, 4, 4, 2, 1, 1),
    (64, 128, 8, 4, 1, 1, 1),
    (64, 128, 8, 3, 2, 1, 1),
    (64, 256, 8, 3, 1, 1, 1),
    (128, 64, 4, 3, 2, 1, 1),
    (128, 128, 8, 3, 1, 1, 1),
    (128, 128, 8, 4, 1, 1, 1),
)
SPLIT_ROWS = 1.0  # mean rows of an expert up to which tiles with several parts are compared
TILE_ROWS = 3.0  # a tile has at most this many times the mean rows of an expert, or 16
LAYERS, DRAWS, ROUNDS = 4, 2, 7  # weights and routings that take turns, so that no cache holds them


@dataclass(frozen=True)
class Shape:
    """The experts of one layer."""

    experts: int
    top_k: int
    hidden: int
    width: int
    format: FourBitFormat
    activation: Activation = "silu"
    bias: bool = False

    def backend_shape(self, device: str, rows: int) -> BackendShape:
        """Return what backends are chosen by."""
        return BackendShape(
            device=device,
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
            num_ranks=1,
            hidden_size=self.hidden,
            moe_intermediate_size=self.width,
            num_experts=self.experts,
            top_k=self.top_k,
            max_num_tokens=rows,
            four_bit=self.format,
            expert_bias=self.bias,
        )


MODELS = {
    "Qwen3-30B-A3B": Shape(128, 8, 2048, 768, FourBitFormat("int4", 128)),
    "gpt-oss-120b": Shape(
        *(128, 4, 2880, 2880, FourBitFormat("mxfp4", 32)),
        activation="clamped_swiglu",
        bias=True,
    ),
    "tiny": Shape(8, 2, 128, 64, FourBitFormat("int4", 32, zeros=True)),
}


class Products:
    """The products of one backend with random weights of some layers."""

    def __init__(self, shape: Shape, gemm: GroupedGemm, device: str):
        self.shape, self.gemm, self.device = shape, gemm, torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.layers = [self._layer() for _ in range(LAYERS)]
        self._order = Permutation(
            range(shape.experts),
            num_experts=shape.experts,
            device=self.device,
            dtype=torch.int64,
            alignment=gemm.row_alignment,
            unaligned_rows=gemm.unaligned_rows,
        )

    def _layer(self) -> tuple[Any, Any, Biases | None]:
        shape, new = self.shape, {"device": self.device, "dtype": self.dtype}
        w13 = self._weights(2 * shape.width, shape.hidden)
        w2 = self._weights(shape.hidden, shape.width)
        if not shape.bias:
            return w13, w2, None
        b13 = torch.randn(shape.experts, 2 * shape.width, **new)  # type: ignore[arg-type]
        return w13, w2, (b13, torch.randn(shape.experts, shape.hidden, **new))  # type: ignore[arg-type]

    def _weights(self, rows: int, columns: int) -> Any:
        """Return random weights in the form of the product, of the size that keeps rows near 1."""
        found = self.gemm.empty_weights(
            self.shape.experts, rows, columns, device=self.device, dtype=self.dtype
        )
        scale = columns**-0.5
        if isinstance(found, FourBitWeights):
            found.values.random_(0, 256)
            found.scales.fill_(120 if found.format.kind == "mxfp4" else scale / 4)
            if found.zeros is not None:
                found.zeros.fill_(8)
        elif isinstance(found, BlockWeights):
            found.values.copy_(torch.randn(found.shape, device=self.device))
            found.scales.fill_(scale)
        else:
            found.normal_(0, scale)
        return found

    def draw(self, rows: int, seed: int) -> ExpertInput:
        """Return `rows` rows, routed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        new: dict[str, Any] = {"device": self.device, "generator": generator}
        x_ND = torch.randn(rows, self.shape.hidden, **new).to(self.dtype)
        scores = torch.rand(rows, self.shape.experts, **new)
        weights = torch.rand(rows, self.shape.top_k, **new)
        topk_idx_NK = scores.topk(self.shape.top_k, dim=-1).indices
        return permute_local(x_ND, topk_idx_NK, weights, self._order, None)

    def measure(self, rows: int, rounds: int, hardware: Hardware) -> dict[str, Any]:
        """Return microseconds of both products of a layer, and the share of the floor in percent."""
        drawn = [self.draw(rows, seed) for seed in range(DRAWS)]

        def call(index: int) -> torch.Tensor:
            w13, w2, biases = self.layers[index % LAYERS]
            routed = drawn[index // LAYERS]
            return self.gemm(routed, w13, w2, self.shape.activation, biases)

        on_gpu, times = self.device.type == "cuda", LAYERS * DRAWS
        runs = {"us": repeated(call, times, graph=on_gpu)}
        (us,) = alternate(runs, rounds, times, self.device, digits=2).values()
        used = sum(self._used_experts(routed) for routed in drawn) / DRAWS
        floor_us = self.floor_us(rows, used, hardware)
        return {
            "us": us,
            "used_experts": used,
            "floor_us": round(floor_us, 2),
            "percent_of_floor": round(100 * floor_us / us, 1),
        }

    def measure_tiles(self, rows: int, rounds: int) -> dict[str, dict[str, float]]:
        """Return microseconds of each product alone by tile; of `triton_four_bit` only."""
        from kernels.triton.four_bit_tiles import FourBitTile
        from kernels.triton.grouped_gemm_four_bit import grouped_gemm_four_bit
        from kernels.triton.split_depth import new_counters

        routed = [self.draw(rows, seed) for seed in range(DRAWS)]
        routing_of_one = routed[0].device_routing()
        mean, num_sms = routing_of_one.mean_rows, self.gemm._num_sms  # type: ignore[attr-defined]
        shared: dict[str, Any] = {
            "num_sms": num_sms,
            "expected": routing_of_one.expected,
            "counters": new_counters(self.device),
        }
        shape, times = self.shape, LAYERS * DRAWS
        inner = torch.randn(routing_of_one.num_permuted, shape.width, device=self.device).to(
            self.dtype
        )

        def up(tile: FourBitTile, index: int) -> torch.Tensor:
            found, (w13, _, biases) = routed[index // LAYERS], self.layers[index % LAYERS]
            routing = found.device_routing()
            bounds = (routing.starts_e, routing.ends_e, routing.num_permuted)
            return grouped_gemm_four_bit(
                *(found.x_RD, routing.row_R, w13, *bounds),
                activation=shape.activation,
                tile=tile,
                **shared,
                bias=biases and biases[0],
            )

        def down(tile: FourBitTile, index: int) -> torch.Tensor:
            found, (_, w2, biases) = routed[index // LAYERS], self.layers[index % LAYERS]
            routing = found.device_routing()
            bounds = (routing.starts_e, routing.ends_e, routing.num_permuted)
            return grouped_gemm_four_bit(
                *(inner, None, w2, *bounds),
                activation=None,
                tile=tile,
                **shared,
                bias=biases and biases[1],
            )

        result: dict[str, dict[str, float]] = {}
        for name, product in (("up", up), ("down", down)):
            runs = {
                str(sizes): repeated(
                    partial(product, FourBitTile(*sizes[:6], early=True, splits=sizes[6])),
                    times,
                    graph=True,
                )
                for sizes in TILES
                if sizes[0] <= max(16, TILE_ROWS * mean) and (sizes[6] == 1 or mean <= SPLIT_ROWS)
            }
            result[name] = alternate(runs, rounds, times, self.device, digits=2)
        return result

    @staticmethod
    def _used_experts(routed: ExpertInput) -> int:
        ends = routed.offs_e
        return int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())

    def floor_us(self, rows: int, used_experts: float, hardware: Hardware) -> float:
        """Return the time of the bytes of the used experts or of the FLOPs, whichever is longer."""
        shape, (w13, w2, _) = self.shape, self.layers[0]
        expert_bytes = sum(_nbytes(weights) for weights in (w13, w2)) / shape.experts
        flops = 6.0 * rows * shape.top_k * shape.hidden * shape.width
        rate = hardware.fp8_flops if self.gemm.fp8_weights else hardware.flops
        return max(used_experts * expert_bytes / hardware.memory_bytes, flops / rate) * 1e6


def _nbytes(weights: Any) -> int:
    if isinstance(weights, BlockWeights):
        return weights.values.nbytes + weights.scales.nbytes
    found: int = weights.nbytes
    return found


def measure_backend(
    args: argparse.Namespace, name: str, backend: str, found: Found, hardware: Hardware
) -> None:
    """Add the figures of one model and backend to `found`; saved after each, so that a failure loses its own alone."""
    shape, what = MODELS[name], f"{name}, {backend}"
    about = shape.backend_shape(args.device, max(args.rows))
    gemm: type[GroupedGemm] = backend_class("grouped_gemm", backend)
    reason = probe(args.device).get(f"grouped_gemm.{backend}") or gemm.unsupported_reason(about)
    if reason is not None:
        found["missing"][what] = reason
        return
    figures = found["models"].setdefault(name, {}).setdefault(backend, {})
    try:
        products = Products(shape, gemm.build(about), args.device)
        for rows in args.rows:
            figures[str(rows)] = products.measure(rows, args.rounds, hardware)
            if args.tiles and backend == "triton_four_bit":
                figures[str(rows)]["tiles_us"] = products.measure_tiles(rows, args.rounds)
            print(f"{what}, {rows} rows: {figures[str(rows)]}", flush=True)
            save(args.out, found)
    except Exception as error:
        found["missing"][f"{what}, or some of it"] = f"{error!r}"[:300]
        print(f"{what}: {error!r}", flush=True)


@torch.inference_mode()
def measure(args: argparse.Namespace) -> Found:
    """Return all figures."""
    found: Found = {
        "what": "microseconds of the experts' two products of one layer",
        **origin(1 if args.device == "cuda" else 0, args.commit),
        "models": {},
        "missing": {},
    }
    hardware = Hardware.of(found["hardware"]["gpus"])
    for name in args.models:
        for backend in args.backends or BACKENDS[args.device]:
            measure_backend(args, name, backend, found, hardware)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    save(args.out, found)
    return found


def table(found: Found) -> str:
    """Return a table of microseconds and shares."""
    lines = [
        (name, backend, rows, f"{row['us']:.1f}", f"{row['percent_of_floor']:.0f} %")
        for name, backends in found["models"].items()
        for backend, figures in backends.items()
        for rows, row in figures.items()
    ]
    return markdown_table(("model", "product", "rows", "us", "of its floor"), lines)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--models", nargs="+", default=models, choices=tuple(MODELS))
    every = tuple(name for names in BACKENDS.values() for name in names)
    parser.add_argument("--backends", nargs="+", choices=every)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="tokens of the rank")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs whose median counts")
    parser.add_argument("--tiles", action="store_true", help="time each product for each of TILES")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_options(parser, drawn=False)
    args = parser.parse_args()
    if args.device == "cuda":
        need_gpus(1, "--device cpu is a dry run")
    return args


def main() -> None:
    """Measure, and print a table."""
    args = parse()
    cuda_environment.prepare(os.environ)
    found = measure(args)
    print(f"{origin_line(found)}\n\n{table(found)}")
    for what, reason in found["missing"].items():
        print(f"not measured: {what}: {reason}")


if __name__ == "__main__":
    main()
