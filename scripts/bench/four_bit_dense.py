"""Times dense products with weights in four bits beside bfloat16 and FP8, on one GPU.

    python -m scripts.bench.four_bit_dense --out /tmp/four-bit-dense

Shapes are those of Qwen3-30B-A3B's attention: the projection to q, k and v, and the one back. The floor is the bytes of
the weights in the product's own format over the memory's rate, or the FLOPs over the rate of the tensor cores. With
--tiles the packed product is also timed for each of TILES. Writes OUT.json.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from kernels import dense_four_bit, dense_fp8
from kernels.backends.select import probe
from kernels.block_fp8 import BLOCK, BlockWeights
from kernels.four_bit import FourBitWeights, quantise_four_bit
from kernels.four_bit_format import FourBitFormat
from kernels.host import cuda_environment
from scripts.bench.inputs import need_gpus
from scripts.bench.results import Found, add_options, markdown_table, origin, origin_line, save
from scripts.bench.roofline import Hardware
from scripts.bench.timing import alternate, repeated

SHAPES = {"q, k, v": (5120, 2048), "output": (2048, 4096)}
FORMATS = {"int4": FourBitFormat("int4", 128), "mxfp4": FourBitFormat("mxfp4", 32)}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
# Rows, columns, warps, stages, programs on an SM, blocks of a stage and most parts of the depth of tiles to compare.
TILES = (
    (16, 64, 4, 4, 4, 2, 4),
    (16, 64, 4, 5, 4, 1, 4),
    (16, 64, 4, 4, 4, 2, 2),
    (16, 128, 4, 5, 3, 1, 4),
    (32, 64, 4, 4, 3, 1, 4),
    (32, 64, 4, 3, 3, 2, 4),
    (32, 64, 4, 4, 3, 1, 2),
    (32, 128, 4, 4, 2, 1, 4),
    (64, 64, 4, 4, 2, 1, 4),
    (64, 64, 4, 3, 2, 2, 4),
    (64, 64, 4, 4, 2, 1, 2),
    (64, 64, 4, 4, 2, 1, 1),
    (64, 128, 4, 4, 2, 1, 4),
    (64, 64, 4, 3, 3, 2, 4),
    (128, 64, 4, 3, 2, 1, 4),
    (128, 128, 8, 4, 1, 1, 4),
)
TILE_ROWS = 2  # a tile has at most this many times the rows of the product, or 16
WEIGHTS, ROUNDS = 24, 7  # matrices that take turns, so that no cache holds them
Product = Callable[[torch.Tensor, int], torch.Tensor]


class Products:
    """The products of one shape with random matrices in each format."""

    def __init__(self, shape: tuple[int, int]):
        self.shape, (outputs, inputs) = shape, shape
        matrix = torch.randn(outputs, inputs, device="cuda") / inputs**0.5
        self._half = [matrix.bfloat16() for _ in range(WEIGHTS)]
        self.packed = {name: self._pack(matrix, form) for name, form in FORMATS.items()}
        self._blocks = [self._block(matrix) for _ in range(WEIGHTS)]

    @staticmethod
    def _pack(matrix: torch.Tensor, form: FourBitFormat) -> list[FourBitWeights]:
        found = []
        for _ in range(WEIGHTS):
            found.append(FourBitWeights.empty(form, *matrix.shape, device="cuda", tiled=True))
            found[-1].set(quantise_four_bit(matrix, form))
        dense_four_bit.prepare(found[0])
        return found

    @staticmethod
    def _block(matrix: torch.Tensor) -> BlockWeights:
        rows, columns = (-(-size // BLOCK) for size in matrix.shape)
        scales = torch.ones(rows, columns, device="cuda")
        return BlockWeights(matrix.to(torch.float8_e4m3fn), scales)

    def all(self, *, fp8: bool) -> dict[str, tuple[Product, float]]:
        """Return the products by name, each with the bits of a weight."""
        found: dict[str, tuple[Product, float]] = {
            "bfloat16": (lambda x, i: F.linear(x, self._half[i]), 16)
        }
        if fp8:
            found["FP8"] = (
                lambda x, i: dense_fp8.multiply(dense_fp8.quantise(x), self._blocks[i]),
                8,
            )
        for name, weights in self.packed.items():
            found[name] = (
                partial(_packed, weights),
                4 + (8 if name == "mxfp4" else 16) / FORMATS[name].group,
            )
        return found

    def tile_times(self, name: str, x_TK: torch.Tensor, rounds: int) -> dict[str, float]:
        """Return microseconds of the packed product by tile."""
        from kernels.triton.four_bit_tiles import FourBitTile

        weights = self.packed[name]

        def product(tile: FourBitTile, index: int) -> torch.Tensor:
            return dense_four_bit.multiply_packed(x_TK, weights[index], tile=tile)

        runs = {
            str(sizes): repeated(
                partial(product, FourBitTile(*sizes[:6], early=True, splits=sizes[6])),
                WEIGHTS,
                graph=True,
            )
            for sizes in TILES
            if sizes[0] <= max(16, TILE_ROWS * len(x_TK))
        }
        return alternate(runs, rounds, WEIGHTS, x_TK.device, digits=2)


def _packed(weights: list[FourBitWeights], x_TK: torch.Tensor, index: int) -> torch.Tensor:
    return dense_four_bit.multiply(x_TK, weights[index])


@torch.inference_mode()
def measure(args: argparse.Namespace) -> Found:
    """Return all figures, saved after each number of rows."""
    found: Found = {
        "what": "microseconds of a dense product",
        **origin(1, args.commit),
        "shapes": {},
    }
    hardware, device = Hardware.of(found["hardware"]["gpus"]), torch.device("cuda")
    fp8 = "grouped_gemm.deepgemm_fp8" not in {
        name for name, reason in probe("cuda").items() if reason
    }
    for label, shape in SHAPES.items():
        products, figures = Products(shape), found["shapes"].setdefault(label, {})
        outputs, inputs = shape
        for rows in args.rows:
            x_TK = torch.randn(rows, inputs, device=device).bfloat16()
            given = products.all(fp8=fp8)
            runs = {
                name: repeated(partial(product, x_TK), WEIGHTS, graph=True)
                for name, (product, _) in given.items()
            }
            times: dict[str, Any] = alternate(runs, args.rounds, WEIGHTS, device, digits=2)
            row = figures[str(rows)] = {"us": times, "percent_of_floor": {}}
            for name, (_, bits) in given.items():
                rate = hardware.fp8_flops if name == "FP8" else hardware.flops
                floor = max(
                    outputs * inputs * bits / 8 / hardware.memory_bytes,
                    2 * rows * outputs * inputs / rate,
                )
                row["percent_of_floor"][name] = round(100e6 * floor / times[name], 1)
            if args.tiles and rows <= dense_four_bit.MOST_PACKED_ROWS:
                row["tiles_us"] = {
                    name: products.tile_times(name, x_TK, args.rounds) for name in FORMATS
                }
            print(f"{label}, {rows} rows: {row}", flush=True)
            save(args.out, found)
        del products
        torch.cuda.empty_cache()
    return found


def table(found: Found) -> str:
    """Return a table of microseconds and shares."""
    lines = []
    for label, figures in found["shapes"].items():
        for rows, row in figures.items():
            cells = (
                f"{us:.1f} ({row['percent_of_floor'][name]:.0f} %)"
                for name, us in row["us"].items()
            )
            lines.append((label, rows, *cells))
    names = next(iter(next(iter(found["shapes"].values())).values()))["us"]
    return markdown_table(("product", "rows", *names), lines)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs whose median counts")
    parser.add_argument("--tiles", action="store_true", help="time each of TILES")
    add_options(parser, drawn=False)
    args = parser.parse_args()
    need_gpus(1, "it times kernels of a GPU")
    cuda_environment.prepare(os.environ)
    found = measure(args)
    print(f"{origin_line(found)}\n\n{table(found)}")


if __name__ == "__main__":
    main()
