"""A tile of kernels.triton.grouped_gemm_fp8 with specialised warps, on Hopper.

One warp of a program loads weights into a ring in shared memory, from tile to tile without a pause, so that the memory
never waits for a product; another warp loads rows. Two groups of four warps multiply half of the rows of a tile each.
As in `kernels.triton.grouped_gemm_fp8` the product is computed transposed, and the scales multiply the sums of a group
of 128 in float32. The kernel is written in Gluon, as `kernels.triton.hopper_gemm`.

W output columns (half of an expert's weight rows where GATED), D input columns, e local experts, R permuted rows.
"""

from dataclasses import dataclass

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

from kernels.triton.grouped_gemm_fp8 import Fp8Operands
from kernels.triton.hopper_ring import (
    activate,
    next_stage,
    start_kernel_after,
    sync_warps,
    tiles_of,
    wait_for_kernel_before,
)
from kernels.triton.hopper_tiles import count_tiles, find_tile, list_tiles, rows_of

TILE_W = gl.constexpr(128)  # columns of a tile, and inputs of a stage: a block of scales
WIDTH = TILE_W.value
REGISTERS = 168  # per thread: 64 Ki for three groups of 128 threads
MAX_E4M3 = gl.constexpr(448.0)
MIN_AMAX = gl.constexpr(1e-4)  # as in kernels.triton.fp8


@dataclass(frozen=True)
class HopperFp8Tile:
    """For Hopper: a tile of `rows` permuted rows by 128 outputs; the ring has `stages` of 128 inputs.

    early   the second product: programs start while the first product ends, and load weights (programmatic dependent
            launch)
    """

    rows: int
    stages: int
    early: bool = False
    programs_per_sm: int = 1

    def launch(self, operands: Fp8Operands, num_sms: int) -> None:
        """Fill the result. `takes` must be true of the operands."""
        assert takes(operands)
        x, (width, depth) = operands.x.values, operands.sizes
        weight_tiles = tiles_of(operands.weights.values.view(-1, depth), [WIDTH, WIDTH])
        x_tiles = weight_tiles if operands.row_R is not None else tiles_of(x, [self.rows, WIDTH])
        programs = num_sms * self.programs_per_sm
        hopper_grouped_gemm_fp8_kernel[(min(programs, operands.most_tiles(self.rows, WIDTH)),)](
            *(x_tiles, x, x.stride(0) // 16, operands.x.scales, *operands.x.scales.stride()),
            *(operands.rows, weight_tiles, operands.weights.scales, *operands.bounds),
            *(*operands.out, width, depth // WIDTH),
            **operands.constants,
            TILE_R=self.rows,
            STAGES=self.stages,
            num_warps=4,
            maxnreg=REGISTERS,
            launch_pdl=self.early,
        )


@gluon.jit
def _load_weights(
    weights,
    ring,
    bounds,
    sizes,
    NUM_EXPERTS: gl.constexpr,
    EXPERTS_2: gl.constexpr,
    GATED: gl.constexpr,
):
    """Run the warp that loads the next weights into each empty stage."""
    x_bufs, w_bufs, ready, empty = ring
    width, num_groups = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    ROWS: gl.constexpr = x_bufs.shape[1]
    BYTES: gl.constexpr = weights.block_type.nbytes * (2 if GATED else 1)
    if GATED:
        wait_for_kernel_before()  # it wrote the bounds; the kernel before the second product is the first
    tiles = list_tiles(bounds, ROWS, NUM_EXPERTS, EXPERTS_2)
    column_tiles, stage, phase = (width + TILE_W - 1) // TILE_W, 0, 1
    num_tiles = count_tiles(tiles, ROWS) * column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, _start, _end = find_tile(tile // column_tiles, tiles, ROWS)
        row = expert * (2 * width if GATED else width) + tile % column_tiles * TILE_W
        for group in range(num_groups):
            mbarrier.wait(empty.index(stage), phase)
            full, w_buf = ready.index(stage), w_bufs.index(stage)
            mbarrier.expect(full, BYTES)
            at = group * TILE_W
            tma.async_copy_global_to_shared(weights, [row, at], full, w_buf.slice(0, TILE_W))
            if GATED:
                up = w_buf.slice(TILE_W, TILE_W)
                tma.async_copy_global_to_shared(weights, [row + width, at], full, up)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _load_rows(
    sources,
    ring,
    bounds,
    sizes,
    NUM_EXPERTS: gl.constexpr,
    EXPERTS_2: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """Run the warp that loads the next rows into each empty stage."""
    x, x_ptr, x_stride_16, row_ptr = sources
    x_bufs, _w_bufs, ready, empty = ring
    width, num_groups = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    ROWS: gl.constexpr = x_bufs.shape[1]
    reads: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    wait_for_kernel_before()
    tiles = list_tiles(bounds, ROWS, NUM_EXPERTS, EXPERTS_2)
    column_tiles, stage, phase = (width + TILE_W - 1) // TILE_W, 0, 1
    num_tiles = count_tiles(tiles, ROWS) * column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _expert, start, end = find_tile(tile // column_tiles, tiles, ROWS)
        if INDEXED:
            permuted = start + gl.arange(0, ROWS, gl.SliceLayout(1, reads))
            rows = rows_of(permuted, end, row_ptr, INDEXED)
            inputs = gl.arange(0, TILE_W, gl.SliceLayout(0, reads))
            x_at = x_ptr + rows[:, None] * (x_stride_16 * 16) + inputs[None, :]
        for group in range(num_groups):
            mbarrier.wait(empty.index(stage), phase)
            full, at = ready.index(stage), group * TILE_W
            if INDEXED:
                async_copy.async_copy_global_to_shared(x_bufs.index(stage), x_at + at)
                async_copy.mbarrier_arrive(full, increment_count=False)
            else:
                mbarrier.expect(full, x.block_type.nbytes)
                tma.async_copy_global_to_shared(x, [start, at], full, x_bufs.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _store(out, outputs, permuted_out, end, column, sizes, GATED: gl.constexpr):
    """Store float32 [TILE_W, rows] of the rows up to `end` - 1; gated ones quantised.

    permuted_out   permuted rows in the layouts of the values and of their scales
    """
    out_ptr, out_scale_ptr, out_scale_stride = outputs
    writes: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    width, _ = sizes
    permuted, permuted_scales = permuted_out
    if GATED:
        scale = gl.maximum(gl.max(gl.abs(out), 0), MIN_AMAX) / MAX_E4M3
        out = out * (1.0 / scale)[None, :]
        scale_at = out_scale_ptr + column // TILE_W * out_scale_stride
        gl.store(scale_at + permuted_scales, scale, mask=permuted_scales < end)
    columns = column + gl.arange(0, TILE_W, gl.SliceLayout(1, writes))
    out_at = out_ptr + permuted.to(gl.int64)[None, :] * width + columns[:, None]
    inside = (permuted < end)[None, :] & (columns < width)[:, None]
    values = gl.convert_layout(out.to(out_ptr.dtype.element_ty), writes)
    gl.store(out_at, values, mask=inside)


@gluon.jit
def _multiply_tile(
    scales,
    ring,
    stage,
    phase,
    num_groups,
    HALF: gl.constexpr,
    GATED: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """Return gate and up, or the product and zeros, float32 [TILE_W, rows] of half HALF of the tile's rows.

    Also returns the stage and phase behind the tile.
    """
    x_scale_at, x_scale_stride, w_scale_at, up_scale_at = scales
    x_bufs, w_bufs, ready, empty = ring
    STAGES: gl.constexpr = x_bufs.shape[0]
    ROWS: gl.constexpr = x_bufs.shape[1] // 2
    wgmma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    out = gl.zeros((TILE_W, ROWS), gl.float32, wgmma)
    up = gl.zeros((TILE_W, ROWS), gl.float32, wgmma)
    for group in range(num_groups):
        x_scale = gl.load(x_scale_at + group * x_scale_stride)
        w_scale = gl.load(w_scale_at + group)
        mbarrier.wait(ready.index(stage), phase)
        if INDEXED:
            fence_async_shared()  # makes the threads' copies visible to the tensor cores
        x, w_buf = x_bufs.index(stage).slice(HALF * ROWS, ROWS).permute((1, 0)), w_bufs.index(stage)
        none = gl.zeros((TILE_W, ROWS), gl.float32, wgmma)
        part = warpgroup_mma(w_buf.slice(0, TILE_W), x, none, use_acc=False, is_async=True)
        if GATED:
            up_scale, up_buf = gl.load(up_scale_at + group), w_buf.slice(TILE_W, TILE_W)
            other = gl.zeros((TILE_W, ROWS), gl.float32, wgmma)
            up_part = warpgroup_mma(up_buf, x, other, use_acc=False, is_async=True)
            part, up_part = warpgroup_mma_wait(0, (part, up_part))
            up += up_part * (x_scale * up_scale)[None, :]
        else:
            part = warpgroup_mma_wait(0, (part,))
        sync_warps()  # all warps have read the stage
        mbarrier.arrive(empty.index(stage))
        out += part * (x_scale * w_scale)[None, :]
        stage, phase = next_stage(stage, phase, STAGES)
    return out, up, stage, phase


@gluon.jit
def _multiply(
    outputs,
    scales,
    ring,
    bounds,
    sizes,
    HALF: gl.constexpr,
    NUM_EXPERTS: gl.constexpr,
    EXPERTS_2: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """Run the multiplying warps of half HALF of the rows of each tile."""
    x_scale_ptr, x_scale_row, x_scale_stride, row_ptr, w_scale_ptr = scales
    x_bufs, _w_bufs, ready, empty = ring
    width, num_groups = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    ROWS: gl.constexpr = x_bufs.shape[1] // 2
    wgmma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    writes: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    wait_for_kernel_before()
    if GATED:
        start_kernel_after()
    tiles = list_tiles(bounds, 2 * ROWS, NUM_EXPERTS, EXPERTS_2)
    column_tiles, stage, phase = (width + TILE_W - 1) // TILE_W, 0, 0
    num_tiles = count_tiles(tiles, 2 * ROWS) * column_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, start, end = find_tile(tile // column_tiles, tiles, 2 * ROWS)
        column = tile % column_tiles * TILE_W
        start += HALF * ROWS
        if start < end:
            permuted = start + gl.arange(0, ROWS, gl.SliceLayout(0, wgmma))
            x_scale_at = x_scale_ptr + rows_of(permuted, end, row_ptr, INDEXED) * x_scale_row
            row_blocks = ((width * 2 if GATED else width) + TILE_W - 1) // TILE_W
            w_scale_at = w_scale_ptr + (expert * row_blocks + column // TILE_W) * num_groups
            up_scale_at = w_scale_at + width // TILE_W * num_groups
            scales_at = (x_scale_at, x_scale_stride, w_scale_at, up_scale_at)
            out, up, stage, phase = _multiply_tile(
                scales_at, ring, stage, phase, num_groups, HALF, GATED, INDEXED
            )
            if GATED:
                out = activate(out, up, ACTIVATION)
            permuted_out = (start + gl.arange(0, ROWS, gl.SliceLayout(0, writes)), permuted)
            _store(out, outputs, permuted_out, end, column, sizes, GATED)
        else:
            for _ in range(num_groups):
                mbarrier.wait(ready.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["x_scale_row", "x_scale_stride", "out_scale_stride"])
def hopper_grouped_gemm_fp8_kernel(
    x,
    x_ptr,
    x_stride_16,
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
    NUM_EXPERTS: gl.constexpr,
    EXPERTS_2: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    INDEXED: gl.constexpr,
    TILE_R: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[i] = x[row_R[i]] @ weights[expert of i].T, tile by tile; `x` and `weights` are descriptors."""
    dtype: gl.constexpr = weights.dtype
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_R, TILE_W], dtype)
    x_bufs = gl.allocate_shared_memory(dtype, [STAGES, TILE_R, TILE_W], x_layout)
    WIDE: gl.constexpr = 2 * TILE_W if GATED else TILE_W
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES, WIDE, TILE_W], weights.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The warps that load arrive once each; for indexed rows each thread arrives when its copies have.
        mbarrier.init(ready.index(stage), count=1 + (32 if INDEXED else 1))
        mbarrier.init(empty.index(stage), count=2)
    sources = (x, x_ptr, x_stride_16, row_ptr)
    scales = (x_scale_ptr, x_scale_row, x_scale_stride, row_ptr, w_scale_ptr)
    outputs = (out_ptr, out_scale_ptr, out_scale_stride)
    ring, bounds = (x_bufs, w_bufs, ready, empty), (starts_ptr, ends_ptr)
    sizes = (width, num_groups)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    # fmt: off
    gl.warp_specialize([
        (_multiply, (outputs, scales, ring, bounds, sizes, first,
                     NUM_EXPERTS, EXPERTS_2, GATED, ACTIVATION, INDEXED)),
        (_multiply, (outputs, scales, ring, bounds, sizes, second,
                     NUM_EXPERTS, EXPERTS_2, GATED, ACTIVATION, INDEXED)),
        (_load_weights, (weights, ring, bounds, sizes, NUM_EXPERTS, EXPERTS_2, GATED)),
        (_load_rows, (sources, ring, bounds, sizes, NUM_EXPERTS, EXPERTS_2, INDEXED)),
    ], [4, 1, 1], [200, 104, 104])
    # fmt: on


def takes(operands: Fp8Operands) -> bool:
    """Return whether the kernel can load x: 16 aligned bytes at a time."""
    x = operands.x.values
    return x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
