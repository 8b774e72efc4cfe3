"""A tile of kernels.triton.grouped_gemm_fp8 with specialised warps, on Hopper.

Two warps of a program load weights, rows and scales into a ring in shared memory (`kernels.triton.hopper_load_fp8`).
Two groups of four warps multiply half of the rows of a tile each. As in `kernels.triton.grouped_gemm_fp8` the product
is computed transposed, and the scales multiply the sums of a group of 128 in float32. The kernel is written in Gluon,
as `kernels.triton.hopper_gemm`.

W output columns (half of an expert's weight rows where GATED), D input columns, e local experts, R permuted rows.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.triton.grouped_gemm_fp8 import Fp8Operands
from kernels.triton.hopper_load_fp8 import GROUP, load_rows, load_weights, scale_buffers
from kernels.triton.hopper_ring import (
    activate,
    next_stage,
    start_kernel_after,
    sync_warps,
    tiles_of,
    wait_for_kernel_before,
)
from kernels.triton.hopper_tiles import count_tiles, find_tile, list_tiles

REGISTERS = 168  # per thread: 64 Ki for three groups of 128 threads
MAX_E4M3 = gl.constexpr(448.0)
MIN_AMAX = gl.constexpr(1e-4)  # as in kernels.triton.fp8


@dataclass(frozen=True)
class HopperFp8Tile:
    """For Hopper: a tile of `rows` permuted rows by `columns` outputs; the ring has `stages` of 128 inputs.

    early    programs start while the kernel before ends (programmatic dependent launch); those of the second product
             load weights then
    columns  128, or 64 of a gated product: more programs share the weights of few experts. A scale of its result is
             then of 64 values, and rows are pairs, see `grouped_gemm_fp8`
    """

    rows: int
    stages: int
    early: bool = False
    columns: int = 128
    programs_per_sm: int = 1

    @property
    def pairs(self) -> bool:
        """See Fp8TileShape."""
        return self.columns < GROUP.value

    def launch(self, operands: Fp8Operands, num_sms: int) -> None:
        """Fill the result. `takes` must be true of the operands."""
        assert takes(operands)
        x, (width, depth) = operands.x.values, operands.sizes
        weight_rows, group = operands.weights.values.view(-1, depth), GROUP.value
        weight_tiles = tiles_of(weight_rows, [self.columns, group])
        x_rows = 2 * self.rows if operands.pairs else self.rows
        x_tiles = weight_tiles if operands.row_R is not None else tiles_of(x, [x_rows, group])
        programs = min(num_sms * self.programs_per_sm, operands.most_tiles(self.rows, self.columns))
        hopper_grouped_gemm_fp8_kernel[(programs,)](
            *(x_tiles, x, x.stride(0) // 16, operands.x.scales, *operands.x.scales.stride()),
            *(operands.rows, weight_tiles, operands.weights.scales, *operands.bounds),
            *(*operands.out, width, depth // group),
            **operands.constants,
            PAIRS=self.pairs if operands.activation else operands.pairs,
            TILE_R=self.rows,
            TILE_W=self.columns,
            STAGES=self.stages,
            num_warps=4,
            maxnreg=REGISTERS,
            launch_pdl=self.early,
        )


@gluon.jit
def _store(out, outputs, start, end, column, sizes, GATED: gl.constexpr, PAIRS: gl.constexpr):
    """Store float32 [TILE_W, rows] of permuted rows from `start` up to `end` - 1; gated ones quantised."""
    out_ptr, out_scale_ptr, out_scale_stride = outputs
    TILE_W: gl.constexpr = out.shape[0]
    ROWS: gl.constexpr = out.shape[1]
    wgmma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    size: gl.constexpr = [TILE_W // 16, 1]
    writes: gl.constexpr = gl.BlockedLayout(size, [16, 2], [1, gl.num_warps()], [0, 1])
    width, _ = sizes
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(0, writes))
    inside, row_parts, part = rows < end, 1, 0
    if GATED:
        if PAIRS:
            row_parts, part = 2, column // TILE_W % 2
        scale = gl.maximum(gl.max(gl.abs(out), 0), MIN_AMAX) / MAX_E4M3
        out = out * (1.0 / scale)[None, :]
        scaled = start + gl.arange(0, ROWS, gl.SliceLayout(0, wgmma))
        scale_at = out_scale_ptr + column // GROUP * out_scale_stride
        gl.store(scale_at + scaled * row_parts + part, scale, mask=scaled < end)
    columns = column + gl.arange(0, TILE_W, gl.SliceLayout(1, writes))
    out_at = out_ptr + (rows.to(gl.int64) * row_parts + part)[None, :] * width + columns[:, None]
    mask = inside[None, :] & (columns < width)[:, None]
    values = gl.convert_layout(out.to(out_ptr.dtype.element_ty), writes)
    gl.store(out_at, values, mask=mask)
    if GATED and PAIRS:  # zeros in the other row of the pair
        zeros = gl.zeros((TILE_W, ROWS), gl.float32, writes).to(out_ptr.dtype.element_ty)
        gl.store(out_at + (1 - 2 * part) * width, zeros, mask=mask)


@gluon.jit
def _multiply_tile(
    ring,
    stage,
    phase,
    num_groups,
    HALF: gl.constexpr,
    GATED: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """Return gate and up, or the product and zeros, float32 [TILE_W, x's rows] of half HALF of the tile's rows.

    Also returns the stage and phase behind the tile.
    """
    x_bufs, w_bufs, scale_bufs, ready, empty = ring
    x_scales, w_scales, up_scales = scale_bufs
    STAGES: gl.constexpr = x_bufs.shape[0]
    ROWS: gl.constexpr = x_bufs.shape[1] // 2
    TILE_W: gl.constexpr = w_bufs.shape[1] // (2 if GATED else 1)
    wgmma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    columns: gl.constexpr = gl.SliceLayout(0, wgmma)
    out = gl.zeros((TILE_W, ROWS), gl.float32, wgmma)
    up = gl.zeros((TILE_W, ROWS), gl.float32, wgmma)
    for _ in range(num_groups):
        mbarrier.wait(ready.index(stage), phase)
        if INDEXED:
            fence_async_shared()  # makes the threads' copies visible to the tensor cores
        x, w_buf = x_bufs.index(stage).slice(HALF * ROWS, ROWS).permute((1, 0)), w_bufs.index(stage)
        none = gl.zeros((TILE_W, ROWS), gl.float32, wgmma)
        part = warpgroup_mma(w_buf.slice(0, TILE_W), x, none, use_acc=False, is_async=True)
        if GATED:
            up_buf = w_buf.slice(TILE_W, TILE_W)
            other = gl.zeros((TILE_W, ROWS), gl.float32, wgmma)
            up_part = warpgroup_mma(up_buf, x, other, use_acc=False, is_async=True)
            part, up_part = warpgroup_mma_wait(0, (part, up_part))
        else:
            part = warpgroup_mma_wait(0, (part,))
        x_scale = x_scales.index(stage).slice(HALF * ROWS, ROWS).load(columns)
        w_scale = w_scales.index(stage).slice(HALF * ROWS, ROWS).load(columns)
        if GATED:
            up_scale = up_scales.index(stage).slice(HALF * ROWS, ROWS).load(columns)
            up += up_part * (x_scale * up_scale)[None, :]
        sync_warps()  # all warps have read the stage
        mbarrier.arrive(empty.index(stage))
        out += part * (x_scale * w_scale)[None, :]
        stage, phase = next_stage(stage, phase, STAGES)
    return out, up, stage, phase


@gluon.jit
def _pass_tile(ring, stage, phase, num_groups):
    """Free the stages of a tile without rows of this half; return the stage and phase behind it."""
    x_bufs, _w_bufs, _scale_bufs, ready, empty = ring
    STAGES: gl.constexpr = x_bufs.shape[0]
    for _ in range(num_groups):
        mbarrier.wait(ready.index(stage), phase)
        mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _multiply(
    outputs,
    ring,
    bounds,
    sizes,
    HALF: gl.constexpr,
    ROWS: gl.constexpr,
    NUM_EXPERTS: gl.constexpr,
    EXPERTS_2: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    INDEXED: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """Run the multiplying warps of half HALF of the rows of each tile."""
    _x_bufs, w_bufs, _scale_bufs, _ready, _empty = ring
    width, num_groups = sizes
    TILE_W: gl.constexpr = w_bufs.shape[1] // (2 if GATED else 1)
    if GATED:
        wait_for_kernel_before()  # it wrote the bounds
        start_kernel_after()
    tiles = list_tiles(bounds, ROWS, NUM_EXPERTS, EXPERTS_2)
    column_tiles, stage, phase = (width + TILE_W - 1) // TILE_W, 0, 0
    num_tiles = count_tiles(tiles, ROWS) * column_tiles
    if not GATED:
        wait_for_kernel_before()
        start_kernel_after()
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _expert, start, end = find_tile(tile // column_tiles, tiles, ROWS)
        column = tile % column_tiles * TILE_W
        start += HALF * (ROWS // 2)
        if start < end:
            out, up, stage, phase = _multiply_tile(
                ring, stage, phase, num_groups, HALF, GATED, INDEXED
            )
            if GATED:
                out = activate(out, up, ACTIVATION)
            elif PAIRS:
                out, other = gl.reshape(out, (TILE_W, ROWS // 2, 2)).split()
                out += other
            _store(out, outputs, start, end, column, sizes, GATED, PAIRS)
        else:
            stage, phase = _pass_tile(ring, stage, phase, num_groups)


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
    PAIRS: gl.constexpr,
    TILE_R: gl.constexpr,
    TILE_W: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[i] = x[row_R[i]] @ weights[expert of i].T, tile by tile; `x` and `weights` are descriptors."""
    dtype: gl.constexpr = weights.dtype
    X_ROWS: gl.constexpr = 2 * TILE_R if PAIRS and not GATED else TILE_R
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([X_ROWS, GROUP], dtype)
    x_bufs = gl.allocate_shared_memory(dtype, [STAGES, X_ROWS, GROUP], x_layout)
    WIDE: gl.constexpr = 2 * TILE_W if GATED else TILE_W
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES, WIDE, GROUP], weights.layout)
    scale_bufs = scale_buffers(STAGES, X_ROWS, GATED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The memory accelerator arrives for weights, and for rows in order; each loading thread when its copies have.
        mbarrier.init(ready.index(stage), count=32 + (1 if INDEXED else 2))
        mbarrier.init(empty.index(stage), count=2)
    sources = (x, x_ptr, x_stride_16, row_ptr)
    scales = (x_scale_ptr, x_scale_row, x_scale_stride, w_scale_ptr)
    outputs = (out_ptr, out_scale_ptr, out_scale_stride)
    ring = (x_bufs, w_bufs, scale_bufs, ready, empty)
    bounds = (starts_ptr, ends_ptr)
    sizes = (width, num_groups)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    # fmt: off
    gl.warp_specialize([
        (_multiply, (outputs, ring, bounds, sizes, first, TILE_R,
                     NUM_EXPERTS, EXPERTS_2, GATED, ACTIVATION, INDEXED, PAIRS)),
        (_multiply, (outputs, ring, bounds, sizes, second, TILE_R,
                     NUM_EXPERTS, EXPERTS_2, GATED, ACTIVATION, INDEXED, PAIRS)),
        (load_weights, (weights, ring, bounds, sizes, TILE_R, NUM_EXPERTS, EXPERTS_2, GATED)),
        (load_rows, (sources, scales, ring, bounds, sizes, TILE_R,
                     NUM_EXPERTS, EXPERTS_2, GATED, INDEXED)),
    ], [4, 1, 1], [200, 104, 104])
    # fmt: on


def takes(operands: Fp8Operands) -> bool:
    """Return whether the kernel can load x: 16 aligned bytes at a time."""
    x = operands.x.values
    return x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
