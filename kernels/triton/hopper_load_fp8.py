"""The warps of `kernels.triton.hopper_gemm_fp8` that load the next stages of its ring.

One warp loads weights, from tile to tile without a pause, so that the memory never waits for a product. Another warp
loads rows, and the scales of rows and weights: warps that multiply would wait for these in each group of inputs.

W output columns (half of an expert's weight rows where GATED), e local experts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.triton.hopper_ring import next_stage, prefetch, wait_for_kernel_before
from kernels.triton.hopper_tiles import count_tiles, find_tile, list_tiles, rows_of

GROUP = gl.constexpr(128)  # inputs of a stage: a block of scales


@gluon.jit
def scale_buffers(STAGES: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr):
    """Return shared memory for the scales of rows, weights, and weights of up if GATED."""
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], line)
    w_scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], line)
    up_scales = w_scales
    if GATED:
        up_scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], line)
    return x_scales, w_scales, up_scales


@gluon.jit
def load_weights(
    weights,
    ring,
    bounds,
    sizes,
    ROWS: gl.constexpr,
    NUM_EXPERTS: gl.constexpr,
    EXPERTS_2: gl.constexpr,
    GATED: gl.constexpr,
):
    """Run the warp that loads the next weights into each empty stage."""
    x_bufs, w_bufs, _scale_bufs, ready, empty = ring
    width, num_groups = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    TILE_W: gl.constexpr = w_bufs.shape[1] // (2 if GATED else 1)
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
            at = group * GROUP
            tma.async_copy_global_to_shared(weights, [row, at], full, w_buf.slice(0, TILE_W))
            if GATED:
                up = w_buf.slice(TILE_W, TILE_W)
                tma.async_copy_global_to_shared(weights, [row + width, at], full, up)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _block_row(expert, column, width, GATED: gl.constexpr):
    """Return the row of blocks of weights that a column of an expert's outputs, of gates if GATED, lies in."""
    return expert * (((width * 2 if GATED else width) + GROUP - 1) // GROUP) + column // GROUP


@gluon.jit
def _load_scales(places, bufs, stage, group, x_scale_stride, up_offset, GATED: gl.constexpr):
    """Begin to load the scales of rows and weights of one group of inputs; a weight's scale once for each row."""
    x_scale_at, w_scale_at = places
    x_scales, w_scales, up_scales = bufs
    x_scale = x_scale_at + group * x_scale_stride
    async_copy.async_copy_global_to_shared(x_scales.index(stage), x_scale)
    async_copy.async_copy_global_to_shared(w_scales.index(stage), w_scale_at + group)
    if GATED:
        up_scale = w_scale_at + (up_offset + group)
        async_copy.async_copy_global_to_shared(up_scales.index(stage), up_scale)


@gluon.jit
def load_rows(
    sources,
    scales,
    ring,
    bounds,
    sizes,
    ROWS: gl.constexpr,
    NUM_EXPERTS: gl.constexpr,
    EXPERTS_2: gl.constexpr,
    GATED: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """Run the warp that loads the next rows, and the scales of rows and weights, into each empty stage."""
    x, x_ptr, x_stride_16, row_ptr = sources
    x_scale_ptr, x_scale_row, x_scale_stride, w_scale_ptr = scales
    x_bufs, w_bufs, scale_bufs, ready, empty = ring
    width, num_groups = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    X_ROWS: gl.constexpr = x_bufs.shape[1]
    TILE_W: gl.constexpr = w_bufs.shape[1] // (2 if GATED else 1)
    ROW_PARTS: gl.constexpr = X_ROWS // ROWS
    reads: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    up_offset = width // GROUP * num_groups
    if GATED:
        wait_for_kernel_before()  # it wrote the bounds
    tiles = list_tiles(bounds, ROWS, NUM_EXPERTS, EXPERTS_2)
    column_tiles, stage, phase = (width + TILE_W - 1) // TILE_W, 0, 1
    num_tiles = count_tiles(tiles, ROWS) * column_tiles
    if not GATED:
        tile = gl.program_id(0)
        if tile < num_tiles:
            expert, _start, _end = find_tile(tile // column_tiles, tiles, ROWS)
            column = tile % column_tiles * TILE_W
            prefetch(w_scale_ptr + _block_row(expert, column, width, GATED) * num_groups)
        wait_for_kernel_before()
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, start, end = find_tile(tile // column_tiles, tiles, ROWS)
        if INDEXED:
            permuted = start + gl.arange(0, ROWS, gl.SliceLayout(1, reads))
            rows = rows_of(permuted, end, row_ptr, INDEXED)
            inputs = gl.arange(0, GROUP, gl.SliceLayout(0, reads))
            x_at = x_ptr + rows[:, None] * (x_stride_16 * 16) + inputs[None, :]
        permuted = start * ROW_PARTS + gl.arange(0, X_ROWS, line)
        scaled = rows_of(permuted, end * ROW_PARTS, row_ptr, INDEXED)
        block = _block_row(expert, tile % column_tiles * TILE_W, width, GATED)
        w_scales = w_scale_ptr + (scaled * 0 + block * num_groups)
        places = (x_scale_ptr + scaled * x_scale_row, w_scales)
        for group in range(num_groups):
            mbarrier.wait(empty.index(stage), phase)
            full, at = ready.index(stage), group * GROUP
            if INDEXED:
                async_copy.async_copy_global_to_shared(x_bufs.index(stage), x_at + at)
            else:
                mbarrier.expect(full, x.block_type.nbytes)
                corner = [start * ROW_PARTS, at]
                tma.async_copy_global_to_shared(x, corner, full, x_bufs.index(stage))
            _load_scales(places, scale_bufs, stage, group, x_scale_stride, up_offset, GATED)
            async_copy.mbarrier_arrive(full, increment_count=False)
            stage, phase = next_stage(stage, phase, STAGES)
