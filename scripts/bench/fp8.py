"""Times FP8 products on one GPU: dense ones against bf16, and the experts' few rows by our kernel against DeepGEMM.

    python -m scripts.bench.fp8 --out OUT.json

Dense: weights of Qwen3-30B-A3B and DeepSeek-V3, by rows. Experts: 64 of Qwen3-30B-A3B and 16 of DeepSeek-V3, by rows
of an expert, with even random routing; `tiles` times each product of our kernel alone with other tiles. Decodes: all
128 experts of Qwen3-30B-A3B, by sequences, from routed ids to the weighted sum, in a chain of layers as a step has,
with our choice of tiles (`own`) and with others; the floor is the time of reading the used experts' weights at 4 TB/s.
GB/s are of weights. Processes compile all kernels before. `--budget` ends the measuring; `--only decodes` leaves out
the rest. Writes one JSON file.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from kernels import dense_fp8
from kernels.all2all.base import ExpertInput
from kernels.all2all.payload import permute_local
from kernels.block_fp8 import BlockWeights, Fp8Rows
from kernels.grouped_gemm.deepgemm import DeepGemm, DeepGemmFp8
from kernels.grouped_gemm.skinny_fp8 import SkinnyFp8
from kernels.routing.device_routing import DeviceRouting, route_on_device
from kernels.routing.permute import Permutation
from scripts.bench.inputs import need_gpus
from scripts.bench.processes import Limits, Report, run_group
from scripts.bench.results import origin, save
from scripts.bench.timing import alternate, repeated

DENSE = {
    "qwen3-30b-a3b qkv": (5120, 2048),
    "qwen3-30b-a3b o": (2048, 4096),
    "deepseek-v3 down": (2112, 7168),
    "deepseek-v3 o": (7168, 16384),
}
ROWS = (1, 16, 64, 256, 4096, 8192)
EXPERTS = {"qwen3-30b-a3b": (64, 2048, 768), "deepseek-v3": (16, 7168, 2048)}
MEANS = (1, 2, 4, 8, 16, 32, 48, 64, 96)
# rows, stages of the ring
UP_TILES = ((16, 6), (16, 4), (32, 5), (32, 3), (64, 5), (64, 4))
DOWN_TILES = ((16, 12), (16, 6), (32, 10), (32, 6), (64, 8), (64, 6))
TILE_MEANS = (2, 8, 16, 32, 64)
# Sequences, and tiles of both products beside our kernel's own choice: rows, stages, early, columns
DECODES = (1, 2, 4, 8, 16, 32, 64, 128)
DECODE_TILES = {
    "wide": ((16, 6, True), (16, 12, True)),
    "narrow": ((16, 12, True, 64), (16, 11, True)),
}
LAYERS, HBM_BYTES_PER_US = 4, 4e6
COMPILERS, COMPILE_S = 24, 100.0
COPIES_BYTES = 200e6  # weights that take turns, so that none is found in the cache
TIMES, ROUNDS = 8, 5

Result = dict[str, Any]
Runs = dict[str, Callable[[int], object]]


def blocks(*shape: int) -> BlockWeights:
    """Weights of random bits without NaN, and scales near 1."""
    held = BlockWeights.empty(*shape, device="cuda")
    held.values.view(torch.uint8).random_(0, 120)
    held.scales.uniform_(0.5, 1.5)
    return held


def dense(name: str, num_rows: int, times: int) -> Result:
    """Microseconds of one product in bf16; of FP8 with rows quantised before it, and of the product alone."""
    shape = DENSE[name]
    held = [blocks(*shape) for _ in range(min(times, int(COPIES_BYTES / shape[0] / shape[1]) + 1))]
    plain = [w.values.to(torch.bfloat16) for w in held]
    x = torch.randn(num_rows, shape[1], device="cuda").bfloat16()
    rows = dense_fp8.quantise(x)
    runs: Runs = {
        "bf16_us": lambda i: F.linear(x, plain[i % len(plain)]),
        "fp8_us": lambda i: dense_fp8.multiply(dense_fp8.quantise(x), held[i % len(held)]),
        "product_us": lambda i: dense_fp8.multiply(rows, held[i % len(held)]),
    }
    found: Result = {"dense": name, "shape": shape, "rows": num_rows, **timed(runs, times)}
    found["fp8_gb_s"] = round(shape[0] * shape[1] / found["product_us"] / 1e3)
    found["bf16_gb_s"] = round(2 * shape[0] * shape[1] / found["bf16_us"] / 1e3)
    found["fp8_tflop_s"] = round(2 * num_rows * shape[0] * shape[1] / found["product_us"] / 1e6, 1)
    return found


class Experts:
    """The experts of one rank, and rows routed to them."""

    def __init__(self, name: str, mean: int):
        self.name, self.mean = name, mean
        self.num, hidden, width = EXPERTS[name]
        self.w13, self.w2 = blocks(self.num, 2 * width, hidden), blocks(self.num, hidden, width)
        generator = torch.Generator("cuda").manual_seed(mean)
        top_k = 8
        num_rows = max(1, mean * self.num // top_k)
        self.x = torch.randn(num_rows, hidden, device="cuda", generator=generator).bfloat16()
        scores = torch.rand(num_rows, self.num, device="cuda", generator=generator)
        ids = scores.topk(top_k).indices
        self.routing: DeviceRouting = route_on_device(
            ids, range(self.num), num_experts=self.num, alignment=128
        )
        self.input = ExpertInput(self.x, self.routing.offs_e, None, self.routing)

    @property
    def used(self) -> int:
        """Experts with rows."""
        return int((self.routing.ends_e > self.routing.starts_e).sum())

    def whole(self, times: int) -> Result:
        """Microseconds of the experts' MLP by our kernels and by DeepGEMM, quantising included."""
        gemm, weights = DeepGemmFp8(), (self.w13, self.w2)
        few, sms = gemm._skinny, gemm._all_sms
        runs: Runs = {
            "skinny_us": lambda _: few(self.input, *weights, num_sms=sms),
            "deepgemm_us": lambda _: DeepGemm.__call__(gemm, self.input, *weights),
        }
        found = timed(runs, times)
        size = sum(w.values[0].numel() for w in weights) * self.used
        for kernel in ("skinny", "deepgemm"):
            found[f"{kernel}_gb_s"] = round(size / found[f"{kernel}_us"] / 1e3)
        return {"experts": self.name, "mean_rows": self.mean, "used": self.used, **found}

    def tiles(self, product: str, tile: tuple[int, ...], times: int) -> Result:
        """Microseconds of one product with a tile."""
        from kernels.triton.grouped_gemm_fp8 import grouped_gemm_fp8
        from kernels.triton.hopper_gemm_fp8 import HopperFp8Tile

        up = product == "up"
        rows = dense_fp8.quantise(self.x)
        if not up:
            activated = torch.randn(self.routing.num_permuted, self.w2.shape[2], device="cuda")
            rows = dense_fp8.quantise(activated.bfloat16())
        held = self.w13 if up else self.w2
        bounds = (self.routing.starts_e, self.routing.ends_e, self.routing.num_permuted)
        sms = torch.cuda.get_device_properties().multi_processor_count

        def run(_: int) -> Fp8Rows:
            return grouped_gemm_fp8(
                *(rows, self.routing.row_R if up else None, held, bounds),
                activation="silu" if up else None,
                tile=HopperFp8Tile(*tile),
                num_sms=sms,
            )

        found = timed({"us": run}, times)
        found["gb_s"] = round(held.values[0].numel() * self.used / found["us"] / 1e3)
        shape = asdict(HopperFp8Tile(*tile))
        return {"tiles": self.name, "product": product, "mean_rows": self.mean, **shape, **found}


class Decode:
    """Decodes through layers of experts, each with its own random routing."""

    num, hidden, width, top_k = 128, 2048, 768, 8

    def __init__(self, seqs: int):
        self.seqs = seqs
        shapes = (2 * self.width, self.hidden), (self.hidden, self.width)
        self.layers = [tuple(blocks(self.num, *shape) for shape in shapes) for _ in range(LAYERS)]
        generator = torch.Generator("cuda").manual_seed(seqs)
        scores = torch.rand(TIMES, seqs, self.num, device="cuda", generator=generator)
        self.ids = list(scores.topk(self.top_k).indices)
        self.x = torch.randn(seqs, self.hidden, device="cuda", generator=generator).bfloat16()
        self.topk_weights = torch.full((seqs, self.top_k), 1e-4, device="cuda")
        self.order = Permutation(range(self.num), num_experts=self.num, device="cuda")

    def layer(self, few: SkinnyFp8, call: int) -> None:
        """Route, multiply and sum; x becomes the sum."""
        rows = (self.x, self.ids[call], self.topk_weights)
        found = permute_local(*rows, self.order, None, fp8=True)
        sms = torch.cuda.get_device_properties().multi_processor_count
        y_RD = few(found, *self.layers[call % LAYERS], num_sms=sms)
        self.x = found.handle.partial_sums(y_RD)

    def times(self, times: int) -> Result:
        """Microseconds of a layer, by tiles, and of reading the weights that it needs."""
        used = sum(len(ids.unique()) for ids in self.ids) / TIMES
        size = used * 3 * self.hidden * self.width
        runs: Runs = {"own": partial(self.layer, SkinnyFp8())}
        for name, tiles in DECODE_TILES.items():
            runs[name] = partial(self.layer, FixedTiles(*tiles))
        found = timed(runs, times)
        floor_us = size / HBM_BYTES_PER_US
        share = round(floor_us / found["own"], 3)
        least = {"used": used, "floor_us": round(floor_us, 2)}
        return {"decodes": self.seqs, **least, **found, "own_share": share}


class FixedTiles(SkinnyFp8):
    """Our kernel with given tiles."""

    def __init__(self, *tiles: tuple[Any, ...]):
        from kernels.triton.hopper_gemm_fp8 import HopperFp8Tile

        super().__init__()
        self.up, self.down = (HopperFp8Tile(*tile) for tile in tiles)

    def tiles(self, mean: float, *, narrow: bool = False) -> tuple[Any, Any]:
        return self.up, self.down


def timed(runs: Runs, times: int) -> dict[str, Any]:
    """Microseconds of each; of one run alone where it only compiles."""
    if times == 1:
        for run in runs.values():
            run(0)
        return dict.fromkeys(runs, 1.0)
    graphs = {name: repeated(run, times, graph=True) for name, run in runs.items()}
    return dict(alternate(graphs, ROUNDS, times, torch.device("cuda"), digits=2))


def tasks(only: str = "") -> Iterator[Callable[[int], Result]]:
    """Yield everything to measure, the most important first; `only` decodes where it names them."""
    for seqs in DECODES:
        yield lambda times, seqs=seqs: Decode(seqs).times(times)
    if only == "decodes":
        return
    for name, mean in itertools.product(EXPERTS, MEANS):
        yield lambda times, name=name, mean=mean: Experts(name, mean).whole(times)
    for shape, num_rows in itertools.product(DENSE, ROWS):
        yield lambda times, shape=shape, num_rows=num_rows: dense(shape, num_rows, times)
    for name, mean in itertools.product(EXPERTS, TILE_MEANS):
        for product, tiles in (("up", UP_TILES), ("down", DOWN_TILES)):
            for tile in tiles:
                if tile[0] <= 4 * mean:
                    yield lambda times, name=name, mean=mean, product=product, tile=tile: Experts(
                        name, mean
                    ).tiles(product, tile, times)


@torch.inference_mode()
def compile_some(rank: int, report: Report, folder: Path, count: int, only: str) -> None:
    """Run a share of the tasks once each, and products of other sizes that a server has."""
    sizes = () if only else range(128, ROWS[-1] + 1, 128)
    served = [
        partial(dense, name, rows) for name, rows in itertools.product(list(DENSE)[:2], sizes)
    ]
    for task in (*list(tasks(only))[rank::count], *served[rank::count]):
        try:
            task(1)
        except Exception as error:
            print(f"compiling: {error!r}"[:300], flush=True)


@torch.inference_mode()
def measure(rank: int, report: Report, folder: Path, only: str) -> None:
    """All tasks, one after the other."""
    for task in tasks(only):
        try:
            report(task(TIMES))
        except Exception as error:
            report({"failed": repr(error)[:300]})
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=140.0, help="seconds of the whole run")
    parser.add_argument("--only", choices=("", "decodes"), default="")
    options = parser.parse_args()
    need_gpus(1)
    begin = time.monotonic()
    end = begin + options.budget
    compiled = run_group(
        compile_some,
        (COMPILERS, options.only),
        COMPILERS,
        Limits(COMPILE_S, min(end, begin + COMPILE_S)),
    )
    compile_s = round(time.monotonic() - begin, 1)
    outcome = run_group(measure, (options.only,), 1, Limits(60.0, end))
    said = {"compiling": compiled.said(), "measuring": outcome.said(), "compile_s": compile_s}
    save(options.out, {**origin(1, None), **said, "results": outcome.reports})


if __name__ == "__main__":
    main()
