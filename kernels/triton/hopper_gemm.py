"""A tile of kernels.triton.grouped_gemm for experts with many rows, with specialised warps, on Hopper.

A program has three groups of four warps. One group loads tiles of rows and weights into a ring in shared memory. The
other two multiply 64 rows each, and the tensor cores never wait for a copy that could have been made earlier (warp
specialisation, as in CUTLASS's kernels for Hopper). The kernel is written in Gluon, the part of Triton that assigns
work to warps.

W output columns, D input columns, e local experts, R permuted rows.
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

from kernels.triton.grouped_gemm import Operands
from kernels.triton.hopper_ring import activate, next_stage, tiles_of

TILE_R, TILE_D = 128, 64
GROUP_R = TILE_R // 2  # rows of one multiplying group
REGISTERS = 168  # per thread: 64 Ki for three groups of 128 threads
FAR = gl.constexpr(1 << 30)  # larger than any number of rows: see _store
ENDLESS = 0x7FFF0000


@dataclass(frozen=True)
class HopperTile:
    """For Hopper: a tile of 128 permuted rows by `columns` outputs; the ring has `stages` of 64 inputs."""

    columns: int
    stages: int
    programs_per_sm = 1

    def launch(self, operands: Operands, num_sms: int) -> None:
        """See Tile. `takes` must be true of the operands."""
        x, row_R, out_RW = operands.x, operands.row_R, operands.out_RW
        assert takes(x, row_R)
        width, depth = operands.sizes
        weight_tiles = tiles_of(operands.weight_rows, [self.columns, TILE_D])
        x_tiles = weight_tiles if row_R is not None else tiles_of(x, [TILE_R, TILE_D])
        out_tiles = tiles_of(
            out_RW,
            [1, 1, GROUP_R, self.columns],
            shape=[ENDLESS, ENDLESS, FAR.value, width],
            strides=[(1 << 34) - width, width, width, 1],
        )
        rows, starts_e, ends_e = operands.bounds
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
def _previous(stage, STAGES: gl.constexpr):
    """Return the stage before. Computed, because Triton takes a variable that a loop only copies for a constant one."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _find_tile(row_tile, expert, tiles_before, bounds, ROWS: gl.constexpr):
    """Return the expert of the row_tile-th tile, the tiles of earlier experts, the tile's first row, the expert's end.

    expert, tiles_before   results for an earlier tile
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
    """Run the loading warps: load the next rows and weights into each empty stage."""
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
            permuted = start + gl.arange(0, ROWS, gl.SliceLayout(1, reads))
            rows = gl.load(row_ptr + permuted, mask=permuted < end, other=0).to(gl.int64)
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
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _store(out, out_tiles, buf, start, end, column):
    """Store the rows of the tile up to `end` - 1, without waiting for the copy.

    A copy stops at the edge of its tensor. So the tensor must end at the expert's last row: rows are counted backwards
    from FAR, and two axes in front of them move the address, modulo 2 ** 64, back to row `end`.
    """
    tma.store_wait(0)
    buf.store(gl.reshape(out.to(buf.dtype), buf.shape))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_tiles, [FAR, end, FAR - (end - start), column], buf)


@gluon.jit
def _multiply(
    outputs,
    ring,
    bounds,
    sizes,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    INDEXED: gl.constexpr,
    TILE_W: gl.constexpr,
):
    """Run the multiplying warps of rows GROUP * 64 .. GROUP * 64 + 63 of each tile."""
    out_tiles, out_bufs = outputs
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
                    fence_async_shared()  # makes the threads' copies visible to the tensor cores
                x = x_bufs.index(stage).slice(GROUP * GROUP_ROWS, GROUP_ROWS)
                weights = w_bufs.index(stage).permute((1, 0))
                out = warpgroup_mma(x, weights, out, use_acc=d > 0, is_async=True)
                out = warpgroup_mma_wait(1, (out,))
                mbarrier.arrive(empty.index(_previous(stage, STAGES)), pred=d > 0)
                stage, phase = next_stage(stage, phase, STAGES)
            out = warpgroup_mma_wait(0, (out,))
            mbarrier.arrive(empty.index(_previous(stage, STAGES)))
            if GATED:
                # The columns of gate, then those of up: a thread holds both values of a pair.
                out, up = gl.permute(gl.reshape(out, (GROUP_ROWS, 2, TILE_W)), (0, 2, 1)).split()
                out = activate(out, up, ACTIVATION)
            _store(out, out_tiles, out_bufs.index(GROUP), start, end, tile % column_tiles * TILE_W)
        else:
            for _ in range(0, depth, DEPTH):
                mbarrier.wait(ready.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)
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
    ACTIVATION: gl.constexpr,
    INDEXED: gl.constexpr,
    TILE_R: gl.constexpr,
    TILE_W: gl.constexpr,
    TILE_D: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[i] = x[row_R[i]] @ weights[expert of i].T, tile by tile."""
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
        # The memory accelerator arrives once for a tile; with indexed rows each loading thread arrives too.
        mbarrier.init(ready.index(stage), count=1 + (32 * LOADERS if INDEXED else 0))
        mbarrier.init(empty.index(stage), count=2)

    sources = (x, x_ptr, x_stride_8, row_ptr, weights)
    outputs, ring = (out_tiles, out_bufs), (x_bufs, w_bufs, ready, empty)
    bounds = (starts_ptr, ends_ptr)
    sizes = (num_tiles, column_tiles, depth)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply, (outputs, ring, bounds, sizes, first, GATED, ACTIVATION, INDEXED, TILE_W)),
            (_multiply, (outputs, ring, bounds, sizes, second, GATED, ACTIVATION, INDEXED, TILE_W)),
            (_load, (sources, ring, bounds, sizes, width, GATED, INDEXED, TILE_W)),
        ],
        [4, LOADERS],
        [224, 56],
    )


def takes(x: torch.Tensor, row_R: torch.Tensor | None) -> bool:
    """Return whether the kernel can load x: 16 bits a value, and through an index 16 aligned bytes at a time."""
    whole = x.shape[1] % TILE_D == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.element_size() == 2 and (whole or row_R is None)
