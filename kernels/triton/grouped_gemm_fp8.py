"""One product of FP8 rows with their experts' FP8 weights, for the few rows of an expert in a decode.

The kernel is persistent, as `kernels.triton.grouped_gemm`'s, and needs no alignment of rows. Rows have a scale for each
128 values, weights one for each block of 128 x 128. The tensor cores multiply e4m3 values of one block at a time; the
scales multiply the sums of a block in float32. With GATED the result is activation(gate) * up, quantised for the next
product.

W output columns (half of an expert's weight rows where GATED), D input columns, e local experts, R permuted rows.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.activation import Activation
from kernels.block_fp8 import BlockWeights, Fp8Rows
from kernels.triton.fp8 import GROUP, quantise
from kernels.triton.gated_activation import activate
from kernels.triton.grouped_gemm import find_tile
from kernels.triton.quantise_rows import empty_scales


@dataclass(frozen=True)
class Fp8Operands:
    """The arguments of `grouped_gemm_fp8`, and out, the result, which is not empty.

    pairs   x has two rows for each permuted row, of which it is the sum
    """

    x: Fp8Rows
    row_R: torch.Tensor | None
    weights: BlockWeights
    bounds: tuple[torch.Tensor, torch.Tensor]
    activation: Activation | None
    result: Fp8Rows
    num_permuted: int
    pairs: bool = False

    @property
    def rows(self) -> torch.Tensor:
        """Indices of the permuted rows; another tensor where x has the permuted rows."""
        return self.bounds[0] if self.row_R is None else self.row_R

    @property
    def out(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The result, its scales, and their stride from group to group; of a product that is not gated, others."""
        values, scales = self.result
        return values, self.x.scales if self.activation is None else scales, scales.stride(1)

    @property
    def sizes(self) -> tuple[int, int]:
        """W and D."""
        return self.result.values.shape[1], self.x.values.shape[1]

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that kernels are compiled for."""
        num_experts = len(self.weights.values)
        return {
            "NUM_EXPERTS": num_experts,
            "EXPERTS_2": triton.next_power_of_2(num_experts),
            "GATED": self.activation is not None,
            "ACTIVATION": self.activation,
            "INDEXED": self.row_R is not None,
        }

    def most_tiles(self, rows: int, columns: int) -> int:
        """Return the largest number of tiles of this shape for any distribution of rows to experts."""
        num_permuted, width = self.num_permuted, self.sizes[0]
        row_tiles = num_permuted // rows + len(self.weights.values)
        return row_tiles * triton.cdiv(width, columns)


class Fp8TileShape(Protocol):
    """The shape of a tile, and the launch of its kernel.

    pairs   the gated result has pairs of rows
    """

    @property
    def pairs(self) -> bool: ...

    def launch(self, operands: Fp8Operands, num_sms: int) -> None:
        """Fill operands.result on at most `num_sms` SMs."""


@dataclass(frozen=True)
class Fp8Tile:
    """A tile of `rows` permuted rows by `columns` outputs; gated products need 128 columns.

    programs_per_sm   programs that fit on an SM at once
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    pairs = False

    def launch(self, operands: Fp8Operands, num_sms: int) -> None:
        """See Fp8TileShape."""
        (values, scales), (width, depth) = operands.x, operands.sizes
        assert GROUP % self.columns == 0 and not operands.pairs
        assert operands.activation is None or self.columns == GROUP, self
        rows = operands.weights.values.view(-1, depth)
        most_tiles = operands.most_tiles(self.rows, self.columns)
        grouped_gemm_fp8_kernel[(min(num_sms * self.programs_per_sm, most_tiles),)](
            *(values, values.stride(0), scales, *scales.stride()),
            operands.rows,
            TensorDescriptor.from_tensor(rows, [self.columns, GROUP]),
            operands.weights.scales,
            *(*operands.bounds, *operands.out, width, depth // GROUP),
            **operands.constants,
            TILE_R=self.rows,
            TILE_W=self.columns,
            GROUP=GROUP,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )


@triton.jit
def _multiply(
    x_at,
    x_scale_at,
    x_scale_stride,
    weights,
    weight_row,
    w_scale_at,
    num_groups,
    TILE_R: tl.constexpr,
    TILE_W: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return float32 [TILE_W, TILE_R]: weights @ x.T."""
    out = tl.zeros((TILE_W, TILE_R), tl.float32)
    for group in range(num_groups):
        scale = tl.load(x_scale_at + group * x_scale_stride) * tl.load(w_scale_at + group)
        x = tl.load(x_at + group * GROUP)
        out += tl.dot(weights.load([weight_row, group * GROUP]), x.T) * scale[None, :]
    return out


@triton.jit
def _multiply_gated(
    x_at,
    x_scale_at,
    x_scale_stride,
    weights,
    gate_row,
    up_row,
    gate_scale_at,
    up_scale_at,
    num_groups,
    ACTIVATION: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_W: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return float32 [TILE_W, TILE_R]: activation(gate @ x.T) * (up @ x.T)."""
    gate = tl.zeros((TILE_W, TILE_R), tl.float32)
    up = tl.zeros((TILE_W, TILE_R), tl.float32)
    for group in range(num_groups):
        x_scale = tl.load(x_scale_at + group * x_scale_stride)
        gate_scale, up_scale = tl.load(gate_scale_at + group), tl.load(up_scale_at + group)
        x = tl.load(x_at + group * GROUP).T
        gate += tl.dot(weights.load([gate_row, group * GROUP]), x) * (x_scale * gate_scale)[None, :]
        up += tl.dot(weights.load([up_row, group * GROUP]), x) * (x_scale * up_scale)[None, :]
    return activate(gate, up, ACTIVATION)


@triton.jit
def _load_bounds(starts_ptr, ends_ptr, NUM_EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr):
    """Return starts and ends of the experts' rows, both 0 from NUM_EXPERTS on."""
    experts = tl.arange(0, EXPERTS_2)
    starts = tl.load(starts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    return starts, tl.load(ends_ptr + experts, mask=experts < NUM_EXPERTS, other=0)


@triton.jit
def _rows_of(permuted, end, row_ptr, INDEXED: tl.constexpr):
    """Return the rows of x of permuted rows; beyond the end they repeat the last row, so that no load needs a mask."""
    rows = tl.minimum(permuted, end - 1)
    if INDEXED:
        rows = tl.load(row_ptr + rows)
    return rows.to(tl.int64)


@triton.jit(do_not_specialize=["x_scale_row", "x_scale_stride", "out_scale_stride"])
def grouped_gemm_fp8_kernel(
    x_ptr,
    x_stride,
    x_scale_ptr,
    x_scale_row,
    x_scale_stride,
    row_ptr,
    weights,
    w_scale_ptr,
    starts_ptr,
    ends_ptr,
    out_ptr,
    out_scale_ptr,
    out_scale_stride,
    width,
    num_groups,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INDEXED: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_W: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute out[i] = x[row_R[i]] @ weights[expert of i].T, tile by tile; `weights` is a descriptor.

    The product is computed transposed, as in `kernels.triton.grouped_gemm`.
    """
    starts, ends = _load_bounds(starts_ptr, ends_ptr, NUM_EXPERTS, EXPERTS_2)
    column_tiles = tl.cdiv(width, TILE_W)
    num_tiles = tl.sum((ends - starts + TILE_R - 1) // TILE_R) * column_tiles
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, start, end = find_tile(tile // column_tiles, starts, ends, TILE_R)
        column, permuted = tile % column_tiles * TILE_W, start + tl.arange(0, TILE_R)
        rows = _rows_of(permuted, end, row_ptr, INDEXED)
        x_at = x_ptr + rows[:, None] * x_stride + tl.arange(0, GROUP)[None, :]
        x_scale_at, weight_rows = x_scale_ptr + rows * x_scale_row, width * 2 if GATED else width
        weight_row = expert * weight_rows + column
        scale_row = expert * tl.cdiv(weight_rows, GROUP) + column // GROUP
        w_scale_at = w_scale_ptr + scale_row.to(tl.int64) * num_groups
        columns, inside = column + tl.arange(0, TILE_W), permuted < end
        out_at = out_ptr + permuted.to(tl.int64)[:, None] * width + columns[None, :]
        if GATED:
            out = _multiply_gated(
                *(x_at, x_scale_at, x_scale_stride, weights, weight_row, weight_row + width),
                *(w_scale_at, w_scale_at + width // GROUP * num_groups, num_groups),
                *(ACTIVATION, TILE_R, TILE_W, GROUP),
            )
            out, scale = quantise(out.T)
            tl.store(out_at, out, mask=inside[:, None])
            out_scale_at = out_scale_ptr + (column // GROUP).to(tl.int64) * out_scale_stride
            tl.store(out_scale_at + permuted, scale, mask=inside)
        else:
            out = _multiply(
                *(x_at, x_scale_at, x_scale_stride, weights, weight_row, w_scale_at, num_groups),
                *(TILE_R, TILE_W, GROUP),
            )
            out = out.T.to(out_ptr.dtype.element_ty)
            tl.store(out_at, out, mask=inside[:, None] & (columns < width)[None, :])


def grouped_gemm_fp8(
    x: Fp8Rows,
    row_R: torch.Tensor | None,
    weights: BlockWeights,
    bounds: tuple[torch.Tensor, torch.Tensor, int],
    *,
    activation: Activation | None,
    tile: Fp8TileShape,
    num_sms: int,
    pairs: bool = False,
) -> Fp8Rows:
    """Return bfloat16 [R, W] without scales, or gated rows in FP8; unused permuted rows are undefined.

    Gated rows of a tile with `pairs` are pairs, [2R, W]: row 2i has the first 64 values of each 128 of permuted row i,
    and zeros in place of the others, which row 2i + 1 has. So each 64 values have a scale.

    x          rows of D columns, contiguous in the last axis, a row at least; scales of any strides
    row_R      int32 row of x of each permuted row; None: x has the permuted rows
    weights    [e, W, D], gated [e, 2W, D] with gate rows first; contiguous; D, and a gated W, are multiples of 128
    bounds     int32 starts_e and ends_e: the permuted rows of expert i are starts_e[i] .. ends_e[i] - 1; R
    activation   of the gated product; None: the product is not gated
    pairs      x has pairs of permuted rows
    """
    values = x.values
    starts_e, ends_e, num_permuted = bounds
    num_experts, weight_rows, depth = weights.values.shape
    gated = activation is not None
    width = weight_rows // 2 if gated else weight_rows
    assert values.stride(1) == 1 and values.shape[1] == depth and depth % GROUP == 0, depth
    assert weights.values.is_contiguous() and weights.scales.is_contiguous()
    assert not gated or width % GROUP == 0, width
    new_dtype = values.dtype if gated else torch.bfloat16
    num_out = 2 * num_permuted if gated and tile.pairs else num_permuted
    out_RW = torch.empty(num_out, width, dtype=new_dtype, device=values.device)
    out_scale = empty_scales(num_out, width // GROUP if gated else 0, values.device)
    result = Fp8Rows(out_RW, out_scale)
    if num_permuted and num_experts:
        sides = (starts_e, ends_e)
        operands = Fp8Operands(x, row_R, weights, sides, activation, result, num_permuted, pairs)
        tile.launch(operands, num_sms)
    return result
