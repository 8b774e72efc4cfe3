"""A tile of kernels.triton.grouped_gemm for many rows an expert, by warps that each do one part of it, on Hopper.

Of a program's three groups of four warps one brings tiles of rows and weights into a ring in shared memory, the others
multiply 64 rows each and keep the tensor cores busy meanwhile: for the copies, and the next tile's, nobody waits
(warp specialisation, as in CUTLASS's kernels for Hopper). Written in Gluon, the part of Triton in which the program
says which warps do what.

W output columns, D input columns, e local experts, R places.
"""

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.triton.grouped_gemm import Operands

TILE_R, TILE_D = 128, 64
GROUP_R = TILE_R // 2  # rows of one multiplying group
REGISTERS = 168  # a thread: 64 Ki for three groups of 128 threads
FAR = gl.constexpr(1 << 30)  # more rows than there are: see _store
ENDLESS = 0x7FFF0000


@dataclass(frozen=True)
class HopperTile:
    """For Hopper: a tile is 128 places by `columns` outputs; `stages` of 64 inputs are in the ring."""

    columns: int
    stages: int
    programs_per_sm = 1

    def launch(self, operands: Operands, num_sms: int) -> None:
        """As Tile's, of what `takes`."""
        x, row_R, out_RW = operands.x, operands.row_R, operands.out_RW
        assert takes(x, row_R)
        width, depth = operands.sizes
        weight_tiles = _tiles(operands.weight_rows, [self.columns, TILE_D])
        x_tiles = weight_tiles if row_R is not None else _tiles(x, [TILE_R, TILE_D])
        out_tiles = _tiles(
            out_RW,
            [1, 1, GROUP_R, self.columns],
            shape=[ENDLESS, ENDLESS, FAR.value, width],
            strides=[(1 << 34) - width, width, width, 1],
        )
        rows, starts_e, ends_e = operands.places
        grid = (min(num_sms, operands.most_tiles(TILE_R, self.columns)),)
        hopper_grouped_gemm_kernel[grid](
            *(out_tiles, x_tiles, x, x.stride(0) // 8, rows, weight_tiles, starts_e, ends_e),
            *(width, depth),
            **operands.constants,
            TILE_R=TILE_R,
            TILE_W=self.columns,
            TILE_D=TILE_D,
            STAGES=self.stages,
            num_warps=4,
            maxnreg=REGISTERS,
        )


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The ring's next stage, and which of a barrier's two phases it is in."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _previous(stage, STAGES: gl.constexpr):
    """Computed, since Triton takes a variable that a loop sets to another one's value for one that it leaves alone."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _find_tile(row_tile, expert, tiles_before, bounds, ROWS: gl.constexpr):
    """Expert of the row_tile-th tile of rows, tiles of the experts before it, the tile's first place, the expert's end.

    `expert` and `tiles_before` are those of an earlier tile.
    """
    starts_ptr, ends_ptr = bounds
    start, end = gl.load(starts_ptr + expert), gl.load(ends_ptr + expert)
    row_tiles = (end - start + ROWS - 1) // ROWS
    while row_tile >= tiles_before + row_tiles:
        tiles_before += row_tiles
        expert += 1
        start, end = gl.load(starts_ptr + expert), gl.load(ends_ptr + expert)
        row_tiles = (end - start + ROWS - 1) // ROWS
    return expert, tiles_before, start + (row_tile - tiles_before) * ROWS, end


@gluon.jit
def _load(
    sources,
    ring,
    bounds,
    sizes,
    width,
    GATED: gl.constexpr,
    INDEXED: gl.constexpr,
    TILE_W: gl.constexpr,
):
    """The loading warps: into each stage that is empty the next rows and weights."""
    x, x_ptr, x_stride_8, row_ptr, weights = sources
    x_bufs, w_bufs, ready, empty = ring
    num_tiles, column_tiles, depth = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    ROWS: gl.constexpr = x_bufs.shape[1]
    DEPTH: gl.constexpr = x_bufs.shape[2]
    BYTES: gl.constexpr = weights.block_type.nbytes * (2 if GATED else 1)
    X_BYTES: gl.constexpr = 0 if INDEXED else x.block_type.nbytes
    reads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    expert, tiles_before, stage, phase = 0, 0, 0, 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, tiles_before, start, end = _find_tile(
            tile // column_tiles, expert, tiles_before, bounds, ROWS
        )
        row = expert * (2 * width if GATED else width) + tile % column_tiles * TILE_W
        if INDEXED:
            places = start + gl.arange(0, ROWS, gl.SliceLayout(1, reads))
            rows = gl.load(row_ptr + places, mask=places < end, other=0).to(gl.int64)
            inputs = gl.arange(0, DEPTH, gl.SliceLayout(0, reads))
            x_at = x_ptr + rows[:, None] * (x_stride_8 * 8) + inputs[None, :]
        for d in range(0, depth, DEPTH):
            mbarrier.wait(empty.index(stage), phase)
            full, w_buf = ready.index(stage), w_bufs.index(stage)
            mbarrier.expect(full, BYTES + X_BYTES)
            tma.async_copy_global_to_shared(weights, [row, d], full, w_buf.slice(0, TILE_W))
            if GATED:
                up = w_buf.slice(TILE_W, TILE_W)
                tma.async_copy_global_to_shared(weights, [row + width, d], full, up)
            if INDEXED:
                async_copy.async_copy_global_to_shared(x_bufs.index(stage), x_at + d)
                async_copy.mbarrier_arrive(full, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x, [start, d], full, x_bufs.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _store(out, out_tiles, buf, start, end, column):
    """Rows start .. end - 1 at most, without waiting for the copy.

    The copy is cut at the edge of a tensor, so this tensor ends where the expert's rows do: its rows are counted
    backwards from FAR, and two axes in front of them bring the address back, modulo 2 ** 64, to row `end`.
    """
    tma.store_wait(0)
    buf.store(gl.reshape(out.to(buf.dtype), buf.shape))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_tiles, [FAR, end, FAR - (end - start), column], buf)


@gluon.jit
def _multiply(
    out_tiles,
    out_bufs,
    ring,
    bounds,
    sizes,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    INDEXED: gl.constexpr,
    TILE_W: gl.constexpr,
):
    """The multiplying warps of rows GROUP * 64 .. GROUP * 64 + 63 of each tile."""
    x_bufs, w_bufs, ready, empty = ring
    num_tiles, column_tiles, depth = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    ROWS: gl.constexpr = x_bufs.shape[1]
    DEPTH: gl.constexpr = x_bufs.shape[2]
    WIDE: gl.constexpr = w_bufs.shape[1]
    GROUP_ROWS: gl.constexpr = ROWS // 2
    wgmma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    expert, tiles_before, stage, phase = 0, 0, 0, 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, tiles_before, start, end = _find_tile(
            tile // column_tiles, expert, tiles_before, bounds, ROWS
        )
        start += GROUP * GROUP_ROWS
        if start < end:
            out = gl.zeros((GROUP_ROWS, WIDE), gl.float32, wgmma)
            for d in range(0, depth, DEPTH):
                mbarrier.wait(ready.index(stage), phase)
                if INDEXED:
                    fence_async_shared()  # the tensor cores read past what the threads' own copies see
                x = x_bufs.index(stage).slice(GROUP * GROUP_ROWS, GROUP_ROWS)
                weights = w_bufs.index(stage).permute((1, 0))
                out = warpgroup_mma(x, weights, out, use_acc=d > 0, is_async=True)
                out = warpgroup_mma_wait(1, (out,))
                mbarrier.arrive(empty.index(_previous(stage, STAGES)), pred=d > 0)
                stage, phase = _next(stage, phase, STAGES)
            out = warpgroup_mma_wait(0, (out,))
            mbarrier.arrive(empty.index(_previous(stage, STAGES)))
            if GATED:
                # Gate's columns, then up's: a thread holds both of a pair.
                out, up = gl.permute(gl.reshape(out, (GROUP_ROWS, 2, TILE_W)), (0, 2, 1)).split()
                out = out * (1 / (1 + gl.exp(-out))) * up
            _store(out, out_tiles, out_bufs.index(GROUP), start, end, tile % column_tiles * TILE_W)
        else:
            for _ in range(0, depth, DEPTH):
                mbarrier.wait(ready.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = _next(stage, phase, STAGES)
    tma.store_wait(0)


@gluon.jit
def hopper_grouped_gemm_kernel(
    out_tiles,
    x,
    x_ptr,
    x_stride_8,
    row_ptr,
    weights,
    starts_ptr,
    ends_ptr,
    width,
    depth,
    NUM_EXPERTS: gl.constexpr,
    EXPERTS_2: gl.constexpr,
    GATED: gl.constexpr,
    INDEXED: gl.constexpr,
    TILE_R: gl.constexpr,
    TILE_W: gl.constexpr,
    TILE_D: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out[place] = x[row of place] @ weights[expert of place].T, tile by tile."""
    dtype: gl.constexpr = out_tiles.dtype
    line: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    experts = gl.arange(0, EXPERTS_2, line)
    starts = gl.load(starts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    ends = gl.load(ends_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    column_tiles = (width + TILE_W - 1) // TILE_W
    num_tiles = gl.sum((ends - starts + TILE_R - 1) // TILE_R, 0) * column_tiles

    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_R, TILE_D], dtype)
    x_bufs = gl.allocate_shared_memory(dtype, [STAGES, TILE_R, TILE_D], x_layout)
    WIDE: gl.constexpr = 2 * TILE_W if GATED else TILE_W
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES, WIDE, TILE_D], weights.layout)
    out_shape: gl.constexpr = [2, 1, 1, TILE_R // 2, TILE_W]
    out_bufs = gl.allocate_shared_memory(dtype, out_shape, out_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    LOADERS: gl.constexpr = 4 if INDEXED else 1
    for stage in gl.static_range(STAGES):
        # The copies of the memory accelerator arrive together, of a row by its index each thread's.
        mbarrier.init(ready.index(stage), count=1 + (32 * LOADERS if INDEXED else 0))
        mbarrier.init(empty.index(stage), count=2)

    sources = (x, x_ptr, x_stride_8, row_ptr, weights)
    ring = (x_bufs, w_bufs, ready, empty)
    bounds = (starts_ptr, ends_ptr)
    sizes = (num_tiles, column_tiles, depth)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply, (out_tiles, out_bufs, ring, bounds, sizes, first, GATED, INDEXED, TILE_W)),
            (_multiply, (out_tiles, out_bufs, ring, bounds, sizes, second, GATED, INDEXED, TILE_W)),
            (_load, (sources, ring, bounds, sizes, width, GATED, INDEXED, TILE_W)),
        ],
        [4, LOADERS],
        [224, 56],
    )


def takes(x: torch.Tensor, row_R: torch.Tensor | None) -> bool:
    """Whether it can load these rows of 16 bits a number; through an index a thread copies 16 bytes at once."""
    whole = x.shape[1] % TILE_D == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.element_size() == 2 and (whole or row_R is None)


def _tiles(
    tensor: torch.Tensor,
    block: list[int],
    *,
    shape: list[int] | None = None,
    strides: list[int] | None = None,
) -> TensorDescriptor:
    """Blocks of a tensor, or of what `shape` and `strides` make of it, as the tensor cores read them."""
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(
        tensor, shape or list(tensor.shape), strides or list(tensor.stride()), block, layout
    )
