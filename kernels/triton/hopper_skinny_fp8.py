"""Dense product of few rows in FP8 on Hopper, bound by the latency of reading weights, in Gluon.

A program computes 64 outputs of all rows. One warp loads weights into shared memory, as far as they fit before the rows
are there: while the kernel before still runs, if that lets it (see `kernels.triton.pdl`). Two groups of four warps
multiply every other group of 128 inputs, because one product waits for the one before it; the first group adds the sums
of both. Where outputs are few, `parts` programs share their inputs, and their sums stay apart.

T rows, D inputs, W outputs, P parts.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.block_fp8 import BlockWeights, Fp8Rows
from kernels.triton.fp8 import GROUP
from kernels.triton.hopper_ring import (
    next_stage,
    skip_stages,
    start_kernel_after,
    sync_warps,
    tiles_of,
    wait_for_kernel_before,
)
from kernels.triton.pdl import starts_early

TILE_W = 64
# With more rows, or more weights, DeepGEMM's product is as fast. On one H200, Qwen3-30B-A3B's weights, us behind the
# kernel that quantises, ours / DeepGEMM's: q, k and v 6.8 / 9.1 (32 rows), 8.0 / 8.4 (64); output in 4 parts 6.1 / 9.6,
# 7.8 / 9.0.
MOST_ROWS, MOST_ROWS_IN_PARTS = 32, 64
MOST_WEIGHTS = 2**24
FEWEST_ROWS = 16
SHARED = 200 * 1024  # bytes of a program's ring
MOST_STAGES = 16
SMS = 132  # of an H100 or H200
REGISTERS = 168  # per thread: 64 Ki for three groups of 128 threads
# Up to so many rows the kernel after starts while this one runs. A program here takes the registers of its SM, so the
# programs of the kernel after, one for each row, meet on the SMs without one: 4 of 132 for outputs in 4 parts. On one
# H200 a norm of 4 parts ends 3.4 us after this kernel for 8 rows, and 8.7 us for 32; for 128 rows a norm that starts as
# usual ends 3.8 us after a product of DeepGEMM.
MOST_ROWS_EARLY = gl.constexpr(16)


@gluon.jit
def _load_weights(weights, ring, column, groups):
    """Run the warp that loads weights; it does not wait for the kernel before."""
    x_bufs, w_bufs, _scale_bufs, ready, empty = ring
    first, end = groups
    STAGES: gl.constexpr = x_bufs.shape[0]
    DEPTH: gl.constexpr = x_bufs.shape[2]
    stage, phase = 0, 1
    for group in range(first, end):
        mbarrier.wait(empty.index(stage), phase)
        full = ready.index(stage)
        mbarrier.expect(full, weights.block_type.nbytes)
        tma.async_copy_global_to_shared(weights, [column, group * DEPTH], full, w_bufs.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _load_rows(sources, ring, column, groups, sizes):
    """Run the warp that loads rows, and the scales of rows and weights."""
    x, x_scale_ptr, x_scale_row, x_scale_stride, w_scale_ptr = sources
    x_bufs, _w_bufs, scale_bufs, ready, empty = ring
    x_scales, w_scales = scale_bufs
    first, end = groups
    num_rows, _, num_groups = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    ROWS: gl.constexpr = x_bufs.shape[1]
    DEPTH: gl.constexpr = x_bufs.shape[2]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = gl.minimum(gl.arange(0, ROWS, line), num_rows - 1)
    x_scale_at = x_scale_ptr + rows * x_scale_row
    w_scale_at = w_scale_ptr + (rows * 0 + column // DEPTH * num_groups)
    wait_for_kernel_before()
    stage, phase = 0, 1
    for group in range(first, end):
        mbarrier.wait(empty.index(stage), phase)
        full = ready.index(stage)
        mbarrier.expect(full, x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [0, group * DEPTH], full, x_bufs.index(stage))
        x_scale = x_scale_at + group * x_scale_stride
        async_copy.async_copy_global_to_shared(x_scales.index(stage), x_scale)
        async_copy.async_copy_global_to_shared(w_scales.index(stage), w_scale_at + group)
        async_copy.mbarrier_arrive(full, increment_count=False)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply(outputs, ring, column, groups, sizes, HALF: gl.constexpr):
    """Run the multiplying warps of every other group of inputs, from group HALF on."""
    out_ptr, sum_buf, summed = outputs
    x_bufs, w_bufs, scale_bufs, ready, empty = ring
    x_scales, w_scales = scale_bufs
    first, end = groups
    num_rows, width, _ = sizes
    STAGES: gl.constexpr = x_bufs.shape[0]
    ROWS: gl.constexpr = x_bufs.shape[1]
    WIDE: gl.constexpr = w_bufs.shape[1]
    wgmma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    writes: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    if ROWS <= MOST_ROWS_EARLY:
        start_kernel_after()
    wait_for_kernel_before()
    out = gl.zeros((WIDE, ROWS), gl.float32, wgmma)
    stage, phase = HALF, 0
    for _ in range(first + HALF, end, 2):
        mbarrier.wait(ready.index(stage), phase)
        none = gl.zeros((WIDE, ROWS), gl.float32, wgmma)
        x = x_bufs.index(stage).permute((1, 0))
        part = warpgroup_mma(w_bufs.index(stage), x, none, use_acc=False, is_async=True)
        x_scale = x_scales.index(stage).load(gl.SliceLayout(0, wgmma))
        w_scale = w_scales.index(stage).load(gl.SliceLayout(0, wgmma))
        part = warpgroup_mma_wait(0, (part,))
        sync_warps()  # all warps have read the stage
        mbarrier.arrive(empty.index(stage))
        out += part * (x_scale * w_scale)[None, :]
        stage, phase = skip_stages(stage, phase, 2, STAGES)
    if HALF == 1:
        sum_buf.store(out)
        sync_warps()
        mbarrier.arrive(summed)
    else:
        mbarrier.wait(summed, 0)
        out += sum_buf.load(wgmma)
        rows = gl.arange(0, ROWS, gl.SliceLayout(0, writes))
        columns = column + gl.arange(0, WIDE, gl.SliceLayout(1, writes))
        values = gl.convert_layout(out.to(out_ptr.dtype.element_ty), writes)
        out_at = out_ptr + rows[None, :] * width + columns[:, None]
        gl.store(out_at, values, mask=(rows < num_rows)[None, :])


@gluon.jit(do_not_specialize=["x_scale_row", "x_scale_stride", "num_rows"])
def hopper_skinny_fp8_kernel(
    x,
    x_scale_ptr,
    x_scale_row,
    x_scale_stride,
    weights,
    w_scale_ptr,
    out_ptr,
    num_rows,
    width,
    num_groups,
    groups_of_part,
    TILE_R: gl.constexpr,
    TILE_W: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[part] = x @ weights.T over the inputs of the part; `x` and `weights` are descriptors."""
    dtype: gl.constexpr = weights.dtype
    x_bufs = gl.allocate_shared_memory(dtype, [STAGES, TILE_R, DEPTH], x.layout)
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES, TILE_W, DEPTH], weights.layout)
    sums: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sum_buf = gl.allocate_shared_memory(gl.float32, [TILE_W, TILE_R], sums)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_R], line)
    w_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_R], line)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(summed, count=1)
    for stage in gl.static_range(STAGES):
        # The memory accelerator arrives for weights and for rows, each loading thread when its scales have.
        mbarrier.init(ready.index(stage), count=2 + 32)
        mbarrier.init(empty.index(stage), count=1)
    column_tiles = width // TILE_W
    part = gl.program_id(0) // column_tiles
    column = gl.program_id(0) % column_tiles * TILE_W
    first_group = part * groups_of_part
    out_ptr += part * num_rows * width
    ring = (x_bufs, w_bufs, (x_scales, w_scales), ready, empty)
    groups = (first_group, first_group + groups_of_part)
    sources = (x, x_scale_ptr, x_scale_row, x_scale_stride, w_scale_ptr)
    outputs, sizes = (out_ptr, sum_buf, summed), (num_rows, width, num_groups)
    even: gl.constexpr = 0
    odd: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply, (outputs, ring, column, groups, sizes, even)),
            (_multiply, (outputs, ring, column, groups, sizes, odd)),
            (_load_weights, (weights, ring, column, groups)),
            (_load_rows, (sources, ring, column, groups, sizes)),
        ],
        [4, 1, 1],
        [200, 104, 104],
    )


def takes(x: Fp8Rows, weights: BlockWeights, parts: int) -> bool:
    """Return whether the kernel computes this product, and faster than a library."""
    num_rows, most = len(x.values), MOST_ROWS_IN_PARTS if parts > 1 else MOST_ROWS
    few = 0 < num_rows <= most and weights.values.numel() <= MOST_WEIGHTS
    return few and len(weights.values) % TILE_W == 0 and x.values.is_contiguous()


def parts_of(weights: BlockWeights) -> int:
    """Return the parts of the inputs with which the programs best fill the SMs of a GPU."""
    width, depth = weights.values.shape
    column_tiles, num_groups = width // TILE_W, depth // GROUP
    if column_tiles > SMS // 2:
        return 1
    fitting = [p for p in range(1, num_groups + 1) if num_groups % p == 0]
    return max(parts for parts in fitting if parts * column_tiles <= max(SMS, column_tiles))


def skinny_fp8(x: Fp8Rows, weights: BlockWeights, parts: int = 1) -> torch.Tensor:
    """Return x @ weights.T: bfloat16 [T, W] of one part, else float32 sums [P, T, W].

    x       at most 64 rows, contiguous
    weights   W is a multiple of 64

    parts   a divisor of D / 128
    """
    (num_rows, depth), width = x.values.shape, weights.values.shape[0]
    num_groups = depth // GROUP
    assert 0 < num_rows <= MOST_ROWS_IN_PARTS and x.values.is_contiguous(), x.values.shape
    assert width % TILE_W == 0 and num_groups % parts == 0, (width, depth, parts)
    device = x.values.device
    if parts == 1:
        out = torch.empty(num_rows, width, dtype=torch.bfloat16, device=device)
    else:
        out = torch.empty(parts, num_rows, width, dtype=torch.float32, device=device)
    tile_rows = max(FEWEST_ROWS, 1 << (num_rows - 1).bit_length())
    fitting = SHARED // ((tile_rows + TILE_W) * GROUP) // 2 * 2
    stages = min(MOST_STAGES, fitting, -(-num_groups // parts) + 1 & ~1)
    hopper_skinny_fp8_kernel[(width // TILE_W * parts,)](
        *(tiles_of(x.values, [tile_rows, GROUP]), x.scales, *x.scales.stride()),
        *(tiles_of(weights.values, [TILE_W, GROUP]), weights.scales, out),
        *(num_rows, width, num_groups, num_groups // parts),
        TILE_R=tile_rows,
        TILE_W=TILE_W,
        DEPTH=GROUP,
        STAGES=stages,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_pdl=starts_early(),
    )
    return out
