"""The experts' MLP in FP8 for few rows of each expert, in three launches of Triton kernels.

Rows are quantised once each, in the order in which they arrived, unless they arrived in FP8. The products read them
through the routing, as `triton` does in bfloat16, so that rows of an expert need no alignment. The first product
activates and quantises.

R permuted rows, D hidden, I expert width, e local experts.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput
from kernels.block_fp8 import BLOCK, BlockWeights, Fp8Rows
from kernels.grouped_gemm.unfused import activate_used, unfused_mlp
from kernels.host.hopper import on_hopper
from kernels.lora.experts import ExpertAdapters
from kernels.pending import wait_previous_ubatch

# With more rows of an expert on average, DeepGEMM's product is faster. 64 experts of Qwen3-30B-A3B and 16 of
# DeepSeek-V3 on one H200, us of ours / DeepGEMM: 48 rows 106 / 123 and 208 / 215, 64 rows 134 / 126 and 259 / 219.
MOST_ROWS = 48


class SkinnyFp8:
    """The products of up to MOST_ROWS rows of an expert."""

    def __init__(self, *, hopper: bool | None = None) -> None:
        """hopper: use the kernel for Hopper; None: if this GPU is a Hopper."""
        from kernels.triton import grouped_gemm_fp8
        from kernels.triton.quantise_rows import quantise_rows

        self._kernel, self._quantise = grouped_gemm_fp8, quantise_rows
        self._hopper: Any = None
        if on_hopper() if hopper is None else hopper:
            from kernels.triton import hopper_gemm_fp8

            self._hopper = hopper_gemm_fp8

    @staticmethod
    def takes(expert_input: ExpertInput) -> bool:
        """Return whether there are rows, and few of them."""
        routing = expert_input.device_routing()
        return bool(routing.num_permuted) and routing.mean_rows <= MOST_ROWS

    def __call__(
        self,
        expert_input: ExpertInput,
        w13_e2ID: BlockWeights,
        w2_eDI: BlockWeights,
        activation: Activation = "silu",
        *,
        num_sms: int,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        """Return y_RD in bfloat16; unused permuted rows are undefined. A row and a permuted row at least."""
        routing = expert_input.device_routing()
        row_R = routing.row_R if expert_input.routing else None
        bounds = (routing.starts_e, routing.ends_e, routing.num_permuted)
        wide_tiles = routing.expected * (w2_eDI.values.shape[2] // BLOCK)
        up, down = self.tiles(routing.mean_rows, narrow=2 * wide_tiles <= num_sms)
        product = partial(self._kernel.grouped_gemm_fp8, num_sms=num_sms)
        plain, rows = partial(product, activation=None, tile=down), self._rows(expert_input)
        if adapters is not None:
            if (
                self._hopper is not None
            ):  # a product that starts early expects that bounds were there long before
                plain = partial(plain, tile=replace(down, early=False))
            return unfused_mlp(
                expert_input,
                adapters,
                up=lambda: plain(rows, row_R, w13_e2ID, bounds).values,
                activate=lambda h_R2I: activate_used(h_R2I, routing.ends_e, activation),
                down=lambda h_RI: (
                    plain(self._quantise(h_RI, early=False), None, w2_eDI, bounds).values
                ),
            )
        h_RI = product(rows, row_R, w13_e2ID, bounds, activation=activation, tile=up)
        wait_previous_ubatch()
        return plain(h_RI, None, w2_eDI, bounds, pairs=up.pairs).values

    def _rows(self, expert_input: ExpertInput) -> Fp8Rows:
        if expert_input.scale_RS is not None:
            return Fp8Rows(expert_input.x_RD, expert_input.scale_RS)
        rows: Fp8Rows = self._quantise(expert_input.x_RD)
        return rows

    def tiles(self, mean: float, *, narrow: bool = False) -> tuple[Any, Any]:
        """Return the tiles of the two products for the mean number of rows of an expert.

        narrow   few pairs leave half of the SMs without a tile of 128 columns. us of a layer of Qwen3-30B-A3B on one
                 H200 with narrow / wide tiles: 25.0 / 28.2 for 1 sequence, 35.2 / 35.3 for 2
        """
        from kernels.triton.pdl import starts_early

        if self._hopper is not None:
            tile, early = self._hopper.HopperFp8Tile, starts_early()
            if narrow:
                return tile(16, 12, early, 64), tile(16, 11, early)
            if mean <= 10:
                return tile(16, 6, early), tile(16, 12, early)
            if mean <= 20:
                return tile(32, 5, early), tile(32, 10, early)
            return tile(64, 5, early), tile(64, 8, early)
        Fp8Tile = self._kernel.Fp8Tile
        if mean <= 10:
            return Fp8Tile(16, 128, 4, 3, 2), Fp8Tile(16, 128, 4, 4, 2)
        if mean <= 20:
            return Fp8Tile(32, 128, 4, 2, 2), Fp8Tile(32, 128, 4, 4, 2)
        return Fp8Tile(64, 128, 8, 4, 1), Fp8Tile(64, 128, 8, 6, 1)
