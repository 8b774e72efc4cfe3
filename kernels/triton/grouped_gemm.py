"""One product of rows with their experts' weights. The kernel is persistent: each program computes many tiles.

The tensor memory accelerator, where the GPU has one, loads the weights and the rows that are in expert order. Gathered
rows are read through an index. With GATED the weights hold gate rows, then up rows, and the result is
activation(gate) * up, so that gate and up never reach memory.

W output columns (half of an expert's weight rows where GATED), D input columns, e local experts, R permuted rows.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.activation import Activation
from kernels.triton.gated_activation import activate
from kernels.triton.pdl import begin, dependent_launch


@dataclass(frozen=True)
class Operands:
    """The arguments of `grouped_gemm`, and out_RW, the result, which is not empty."""

    x: torch.Tensor
    row_R: torch.Tensor | None
    weights: torch.Tensor
    starts_e: torch.Tensor
    ends_e: torch.Tensor
    activation: Activation | None
    out_RW: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def weight_rows(self) -> torch.Tensor:
        """The weights of all experts as one matrix [rows, D]."""
        return self.weights.view(-1, self.weights.shape[2])

    @property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Indices of the permuted rows, if any, and starts and ends of the experts' rows."""
        return self.x if self.row_R is None else self.row_R, self.starts_e, self.ends_e

    @property
    def sizes(self) -> tuple[int, int]:
        """W and D."""
        return self.out_RW.shape[1], self.x.shape[1]

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that kernels are compiled for."""
        num_experts = len(self.weights)
        return {
            "NUM_EXPERTS": num_experts,
            "EXPERTS_2": triton.next_power_of_2(num_experts),
            "GATED": self.activation is not None,
            "ACTIVATION": self.activation,
            "INDEXED": self.row_R is not None,
        }

    @property
    def bias_constants(self) -> dict[str, Any]:
        """Whether there is a bias, and where; without, the weights take the place of the address."""
        has_bias = self.bias is not None
        return {"bias_ptr": self.bias if has_bias else self.weights, "HAS_BIAS": has_bias}

    def most_tiles(self, rows: int, columns: int) -> int:
        """Return the largest number of tiles of this shape for any distribution of rows to experts."""
        num_permuted, width = self.out_RW.shape
        return (num_permuted // rows + len(self.weights)) * triton.cdiv(width, columns)


class Tile(Protocol):
    """The shape of a tile, and the launch of its kernel."""

    def launch(self, operands: Operands, num_sms: int) -> None:
        """Fill operands.out_RW on at most `num_sms` SMs."""


@dataclass(frozen=True)
class TileShape:
    """For any GPU: a tile of `rows` permuted rows by `columns` outputs, `depth` inputs at a time.

    programs_per_sm   programs that fit on an SM at once; with more, the last ones wait for the first to end
    early             programs start before the kernel before has ended (kernels.triton.pdl)
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    early: bool = False

    def launch(self, operands: Operands, num_sms: int) -> None:
        """See Tile."""
        x, tiles = operands.x, TensorDescriptor.from_tensor
        weight_tiles = tiles(operands.weight_rows, [self.columns, self.depth])
        x_tiles = weight_tiles if operands.row_R is not None else tiles(x, [self.rows, self.depth])
        row_R, starts_e, ends_e = operands.bounds
        most_tiles = operands.most_tiles(self.rows, self.columns)
        grouped_gemm_kernel[(min(num_sms * self.programs_per_sm, most_tiles),)](
            *(x_tiles, x, x.stride(0), row_R, weight_tiles, starts_e, ends_e, operands.out_RW),
            *operands.sizes,
            **operands.constants,
            **operands.bias_constants,
            EVEN=x.shape[1] % self.depth == 0,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            TILE_R=self.rows,
            TILE_W=self.columns,
            TILE_D=self.depth,
            **dependent_launch(early=self.early),
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )


@triton.jit
def find_tile(row_tile, starts, ends, TILE_R: tl.constexpr):
    """Return expert, first permuted row and end of the expert's rows, of the row_tile-th tile of all rows."""
    experts = tl.arange(0, starts.shape[0])
    row_tiles = (ends - starts + TILE_R - 1) // TILE_R
    tile_ends = tl.cumsum(row_tiles, 0)
    expert = tl.sum((tile_ends <= row_tile).to(tl.int32))
    here = experts == expert
    first_tile = tl.sum(tl.where(here, tile_ends - row_tiles, 0))
    start = tl.sum(tl.where(here, starts, 0)) + (row_tile - first_tile) * TILE_R
    return expert, start, tl.sum(tl.where(here, ends, 0))


@triton.jit
def _multiply(
    x,
    x_at,
    start,
    inside,
    out,
    up,
    weights,
    weight_row,
    up_row,
    depth,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INDEXED: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_W: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Return float32 [TILE_W, TILE_R]: out + weights @ x.T, or activation(out + gate @ x.T) * (up + up @ x.T)."""
    inputs = tl.arange(0, TILE_D)[None, :]
    for d in range(0, depth, TILE_D):
        if INDEXED:
            mask = inside[:, None] if EVEN else inside[:, None] & (inputs < depth - d)
            tile = tl.load(x_at + d, mask=mask, other=0)
        else:
            tile = x.load([start, d])
        out = tl.dot(weights.load([weight_row, d]), tile.T, out, input_precision=PRECISION)
        if GATED:
            up = tl.dot(weights.load([up_row, d]), tile.T, up, input_precision=PRECISION)
    if GATED:
        out = activate(out, up, ACTIVATION)
    return out


@triton.jit
def _start(bias_ptr, row, inside, HAS_BIAS: tl.constexpr, TILE_R: tl.constexpr):
    """Return float32 [TILE_W, TILE_R]: the bias of each weight row from `row` on as far as `inside`, or zeros."""
    rows = tl.arange(0, inside.shape[0])
    out = tl.zeros((inside.shape[0], TILE_R), tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + row + rows, mask=inside, other=0).to(tl.float32)[:, None]
    return out


@triton.jit
def grouped_gemm_kernel(
    x,
    x_ptr,
    x_stride,
    row_ptr,
    weights,
    starts_ptr,
    ends_ptr,
    out_ptr,
    width,
    depth,
    bias_ptr,
    HAS_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INDEXED: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_W: tl.constexpr,
    TILE_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute out[i] = x[row_R[i]] @ weights[expert of i].T, tile by tile; `x` and `weights` are descriptors.

    The product is computed transposed, so that rows are the narrow side of the tensor cores' instruction and a decode's
    few rows per expert waste little.
    """
    begin(PDL)
    experts = tl.arange(0, EXPERTS_2)
    starts = tl.load(starts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    ends = tl.load(ends_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    column_tiles = tl.cdiv(width, TILE_W)
    num_tiles = tl.sum((ends - starts + TILE_R - 1) // TILE_R) * column_tiles
    # Merged loops load the first rows of the next tile early, which is impossible for rows read through an index.
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=not INDEXED):
        expert, start, end = find_tile(tile // column_tiles, starts, ends, TILE_R)
        column = tile % column_tiles * TILE_W
        permuted = start + tl.arange(0, TILE_R)
        x_at = x_ptr + tl.zeros((TILE_R, TILE_D), tl.int64)
        if INDEXED:
            rows = tl.load(row_ptr + permuted, mask=permuted < end, other=0).to(tl.int64)
            x_at = x_ptr + rows[:, None] * x_stride + tl.arange(0, TILE_D)[None, :]
        weight_row = expert * (width * 2 if GATED else width) + column
        columns = column + tl.arange(0, TILE_W)
        up_row = weight_row + width
        out = _start(bias_ptr, weight_row, columns < width, HAS_BIAS, TILE_R)
        up = _start(bias_ptr, up_row, columns < width, HAS_BIAS and GATED, TILE_R)
        out = _multiply(
            *(x, x_at, start, permuted < end, out, up, weights, weight_row, up_row, depth),
            *(GATED, ACTIVATION, INDEXED, EVEN, PRECISION, TILE_R, TILE_W, TILE_D),
        )
        out_at = out_ptr + permuted.to(tl.int64)[:, None] * width + columns[None, :]
        inside = (permuted < end)[:, None] & (columns < width)[None, :]
        tl.store(out_at, out.T.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_gemm(
    x: torch.Tensor,
    row_R: torch.Tensor | None,
    weights: torch.Tensor,
    starts_e: torch.Tensor,
    ends_e: torch.Tensor,
    num_permuted: int,
    *,
    activation: Activation | None,
    tile: Tile,
    num_sms: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [R, W] in x's dtype; unused permuted rows are undefined.

    x          rows of D columns, contiguous in the last axis
    row_R      int32 row of x of each permuted row; None: x has the permuted rows
    weights    [e, W, D], gated [e, 2W, D] with gate rows first; contiguous, rows of a multiple of 16 bytes
    activation   of the gated product; None: the product is not gated
    bias       [e, W], gated [e, 2W], added to the products; contiguous; None: zeros
    starts_e, ends_e   int32: the permuted rows of expert i are starts_e[i] .. ends_e[i] - 1
    """
    num_experts, weight_rows, depth = weights.shape
    width = weight_rows // 2 if activation else weight_rows
    assert weights.is_contiguous() and x.stride(1) == 1 and x.shape[1] == depth
    out_RW = torch.empty(num_permuted, width, dtype=x.dtype, device=x.device)
    if num_permuted and num_experts:
        assert bias is None or (bias.is_contiguous() and bias.shape == weights.shape[:2])
        operands = Operands(x, row_R, weights, starts_e, ends_e, activation, out_RW, bias)
        tile.launch(operands, num_sms)
    return out_RW
