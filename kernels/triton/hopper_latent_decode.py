"""Attention of decodes over pages of latents in e4m3 (MLA) for 64 heads of a program, on Hopper, in Gluon.

As `latent_decode`, with products of 64 rows by both groups of four warps (wgmma): each group has the scores of half of
the keys, and half of the values of the outputs, of all heads. A tile of latents lies in shared memory once, in
bfloat16. The next tile is loaded while scores are computed, and converted while the outputs are.

R rows, a decode each; H heads, C = 512 values of a latent, r = 64 of a rotated key; chunks as in `decode_merge`.
"""

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.triton.decode_merge import Chunks, merge_chunks
from kernels.triton.fp8_heads import E4M3_TO_BFLOATS
from kernels.triton.hopper_ring import sync_warps

HEADS, RANK, ROPE_DIM = 64, 512, 64
NUM_WARPS = 8

LOG2_E = gl.constexpr(1.4426950408889634)
KEYS = gl.constexpr(64)
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0]))
VALUES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
HEADS_OF_SCORES = gl.constexpr(gl.SliceLayout(1, SCORES.value))
ROWS = gl.constexpr(gl.SliceLayout(1, WORDS.value))
KEYS_OF_SCORES = gl.constexpr(gl.SliceLayout(0, SCORES.value))


@gluon.jit
def _power_of_two(exponent):
    """float32 of biased exponents in int32."""
    return (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _wide(words):
    """int32 [keys, C / 4] -> bfloat16 [keys, C], the e4m3 values of each word in order of memory."""
    a, b, c, d = gl.inline_asm_elementwise(
        E4M3_TO_BFLOATS,
        "=h,=h,=h,=h,r",
        [words],
        (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        True,
        1,
    )
    joined = gl.join(gl.join(a, c), gl.join(b, d))
    return gl.reshape(joined, (words.shape[0], 4 * words.shape[1]))


@gluon.jit
def _slots(chunk, at, BLOCK_SIZE: gl.constexpr):
    """Return the slots of the keys from `at` on, -1 for keys outside of the chunk."""
    table_ptr, first, end = chunk
    key = at + gl.arange(0, KEYS, ROWS)
    inside = (key >= first) & (key < end)
    block = gl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(gl.int32)
    return gl.where(inside, block * BLOCK_SIZE + key % BLOCK_SIZE, -1)


@gluon.jit
def _load(caches, slot):
    """Return words of latents, rotated keys and exponents of these slots, zeros where there is none."""
    words_ptr, keys_ptr, exponents_ptr = caches
    inside, slot = slot >= 0, gl.maximum(slot, 0).to(gl.int64)
    word = gl.arange(0, 128, gl.SliceLayout(0, WORDS))
    words_at = words_ptr + (slot * 128)[:, None] + word[None, :]
    words = gl.load(words_at, mask=inside[:, None] & (word >= 0)[None, :], other=0)
    exponents = gl.load(exponents_ptr + slot, mask=inside, other=127).to(gl.int32)
    lines: gl.constexpr = gl.SliceLayout(1, VALUES)
    slot, inside = gl.convert_layout(slot, lines), gl.convert_layout(inside, lines)
    value = gl.arange(0, 64, gl.SliceLayout(0, VALUES))
    keys_at = keys_ptr + (slot * 64)[:, None] + value[None, :]
    keys = gl.load(keys_at, mask=inside[:, None] & (value >= 0)[None, :], other=0)
    return words, keys, exponents


@gluon.jit
def _keep(tile, latent_buf, key_buf, exponent_buf):
    """Store a loaded tile to shared memory, latents in bfloat16."""
    words, keys, exponents = tile
    latent_buf.store(_wide(words))
    key_buf.store(keys)
    exponent_buf.store(exponents)


@gluon.jit
def _queries(q_ptr, stride, first_head, buf, NUM_HEADS: gl.constexpr):
    """Store the queries of the program's heads [heads, values] to shared memory, zeros for heads that there are not."""
    head = first_head + gl.arange(0, buf.shape[0], gl.SliceLayout(1, VALUES))
    value = gl.arange(0, buf.shape[1], gl.SliceLayout(0, VALUES))
    at = q_ptr + (head * stride)[:, None] + value[None, :]
    buf.store(gl.load(at, mask=(head < NUM_HEADS)[:, None] & (value >= 0)[None, :], other=0))


@gluon.jit
def _of_each_group(x):
    """Return the sums of the keys of each group of four warps [heads, 2]."""
    return gl.sum(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 2)


@gluon.jit
def _softmax(scores, inside, exponent, top, total):
    """Return the weights of a tile's keys, maximum, sums and the factor of what was summed up before.

    total   a sum for each group of four warps, which do not wait for each other's
    """
    scores = scores + (exponent - 127).to(gl.float32)[None, :]
    scores = gl.where(inside[None, :], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    floor = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights, decay = gl.exp2(scores - floor[:, None]), gl.exp2(top - floor)
    own = _of_each_group(weights * _power_of_two(254 - exponent)[None, :])
    lines: gl.constexpr = gl.SliceLayout(1, own.type.layout)
    total = total * gl.convert_layout(decay, lines)[:, None] + own
    return weights, new_top, total, decay


@gluon.jit
def _weigh(queries, tile, at, chunk, scale, top, total):
    """Return what `_softmax` does of a tile in shared memory, the keys from `at` on."""
    q_buf, rope_buf = queries
    latent_buf, key_buf, exponent_buf = tile
    _, first, end = chunk
    none = gl.zeros((64, KEYS), gl.float32, SCORES)
    scores = warpgroup_mma(q_buf, latent_buf.permute((1, 0)), none, use_acc=False, is_async=True)
    rotated = warpgroup_mma(rope_buf, key_buf.permute((1, 0)), none, use_acc=False, is_async=True)
    scores, rotated = warpgroup_mma_wait(0, (scores, rotated))
    exponent = exponent_buf.load(KEYS_OF_SCORES)
    scores = (scores * _power_of_two(exponent)[None, :] + rotated) * scale
    key = at + gl.arange(0, KEYS, KEYS_OF_SCORES)
    inside = (key >= first) & (key < end)
    return _softmax(scores, inside, exponent, top, total)


@gluon.jit
def _attend(queries, caches, chunk, scale, BLOCK_SIZE: gl.constexpr):
    """Return maximum, sums and output of a chunk's softmax."""
    _, first, end = chunk
    tiles: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    latent_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, 512], tiles)
    key_buf = gl.allocate_shared_memory(gl.bfloat16, [KEYS, 64], tiles)
    exponent_buf = gl.allocate_shared_memory(gl.int32, [KEYS], line)
    weight_buf = gl.allocate_shared_memory(gl.bfloat16, [64, KEYS], tiles)
    top = gl.full((64,), float("-inf"), gl.float32, HEADS_OF_SCORES)
    total = _of_each_group(gl.zeros((64, KEYS), gl.float32, SCORES))
    out = gl.zeros((64, 512), gl.float32, OUTPUTS)
    start, stage = first // KEYS * KEYS, 0
    loaded = _load(caches, _slots(chunk, start, BLOCK_SIZE))
    # Looked up a tile ahead, because a load of a tile would else wait for a load of its slots.
    slot = _slots(chunk, start + KEYS, BLOCK_SIZE)
    _keep(loaded, latent_bufs.index(0), key_buf, exponent_buf)
    loaded, slot = _load(caches, slot), _slots(chunk, start + 2 * KEYS, BLOCK_SIZE)
    fence_async_shared()
    sync_warps()
    for at in range(start, end, KEYS):
        latents = latent_bufs.index(stage)
        tile = (latents, key_buf, exponent_buf)
        weights, top, total, decay = _weigh(queries, tile, at, chunk, scale, top, total)
        weight_buf.store(weights.to(gl.bfloat16))
        fence_async_shared()
        sync_warps()
        out = out * gl.convert_layout(decay, gl.SliceLayout(1, OUTPUTS))[:, None]
        out = warpgroup_mma(weight_buf, latents, out, use_acc=True, is_async=True)
        stage = 1 - stage
        _keep(loaded, latent_bufs.index(stage), key_buf, exponent_buf)
        out = warpgroup_mma_wait(0, (out,))
        # In front of the barrier, behind which the compiler would put the loads after the next products.
        loaded, slot = _load(caches, slot), _slots(chunk, at + 3 * KEYS, BLOCK_SIZE)
        fence_async_shared()
        sync_warps()
    return top, total, out


@gluon.jit(do_not_specialize=["table_ptr", "table_row", "seq_ptr", "first_ptr", "end_ptr"])
def hopper_latent_decode_kernel(
    q_ptr,
    q_row_8,
    q_head_8,
    rope_ptr,
    rope_row_8,
    rope_head_8,
    words_ptr,
    keys_ptr,
    exponents_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    table_row,
    seq_ptr,
    first_ptr,
    end_ptr,
    scale,
    PARTIAL: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    NUM_HEADS: gl.constexpr,
):
    """One chunk for 64 heads; arguments as of `latent_decode_kernel`, strides of queries in units of 8 values."""
    first_head, chunk = gl.program_id(0) * 64, gl.program_id(1)
    seq = gl.load(seq_ptr + chunk).to(gl.int64)
    if seq < 0:
        return
    tiles: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    q_buf = gl.allocate_shared_memory(gl.bfloat16, [64, 512], tiles)
    rope_buf = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tiles)
    _queries(q_ptr + seq * (q_row_8 * 8), q_head_8 * 8, first_head, q_buf, NUM_HEADS)
    _queries(rope_ptr + seq * (rope_row_8 * 8), rope_head_8 * 8, first_head, rope_buf, NUM_HEADS)
    caches = (words_ptr, keys_ptr, exponents_ptr)
    first, end = gl.load(first_ptr + chunk), gl.load(end_ptr + chunk)
    keys = (table_ptr + seq * table_row, first, end)
    softmax = _attend((q_buf, rope_buf), caches, keys, scale * LOG2_E, BLOCK_SIZE)
    place = chunk.to(gl.int64) if PARTIAL else seq
    _store(out_ptr, lse_ptr, place * NUM_HEADS, first_head, softmax, NUM_HEADS, PARTIAL)


@gluon.jit
def _store(
    out_ptr, lse_ptr, row, first_head, softmax, NUM_HEADS: gl.constexpr, PARTIAL: gl.constexpr
):
    """Store the outputs of heads; with PARTIAL also the log-sum-exps of the chunk in base e."""
    top, total, out = softmax
    total = gl.convert_layout(gl.sum(total, 1), HEADS_OF_SCORES)
    total = gl.where(total == 0, 1.0, total)
    if PARTIAL:
        head = first_head + gl.arange(0, 64, HEADS_OF_SCORES)
        lse = gl.where(top == float("-inf"), top, (top + gl.log2(total)) / LOG2_E)
        gl.store(lse_ptr + row + head, lse, mask=head < NUM_HEADS)
    head = first_head + gl.arange(0, 64, gl.SliceLayout(1, OUTPUTS))
    value = gl.arange(0, 512, gl.SliceLayout(0, OUTPUTS))
    out = out / gl.convert_layout(total, gl.SliceLayout(1, OUTPUTS))[:, None]
    at = out_ptr + ((row + head) * 512)[:, None] + value[None, :]
    used = (head < NUM_HEADS)[:, None] & (value >= 0)[None, :]
    gl.store(at, out.to(out_ptr.dtype.element_ty), mask=used)


def takes(q_RHC: torch.Tensor, rope_RHr: torch.Tensor) -> bool:
    """Return whether the kernel computes decodes of these queries: bfloat16, 512 + 64 values, aligned to 16 bytes."""
    aligned = all(
        stride % 8 == 0 and it.data_ptr() % 16 == 0
        for it in (q_RHC, rope_RHr)
        for stride in it.stride()[:2]
    )
    sizes = q_RHC.shape[2], rope_RHr.shape[2]
    return q_RHC.dtype == torch.bfloat16 and sizes == (RANK, ROPE_DIM) and aligned


def hopper_latent_decode(
    q_RHC: torch.Tensor,
    rope_RHr: torch.Tensor,
    caches: Sequence[torch.Tensor],
    out_RHC: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
) -> None:
    """Write the attention of all rows to out_RHC, or to partial results that are merged; as `latent_decode`."""
    (_, num_heads, rank), num_chunks = q_RHC.shape, len(chunks.seqs)
    values, keys, exponents = caches
    assert takes(q_RHC, rope_RHr), (q_RHC.shape, q_RHC.stride(), rope_RHr.stride())
    partial, lse = out_RHC, out_RHC
    if chunks.cut:
        partial = q_RHC.new_empty(num_chunks, num_heads, rank, dtype=torch.float32)
        lse = partial.new_empty(num_chunks, num_heads)
    hopper_latent_decode_kernel[(-(-num_heads // HEADS), num_chunks)](
        *(q_RHC, q_RHC.stride(0) // 8, q_RHC.stride(1) // 8),
        *(rope_RHr, rope_RHr.stride(0) // 8, rope_RHr.stride(1) // 8),
        *(values.view(torch.int32), keys, exponents, partial, lse),
        *(chunks.block_table, chunks.block_table.stride(0)),
        *(chunks.seqs, chunks.firsts, chunks.ends, scale),
        PARTIAL=chunks.cut,
        BLOCK_SIZE=values.shape[1],
        NUM_HEADS=num_heads,
        num_warps=NUM_WARPS,
    )
    if chunks.cut:
        merge_chunks(partial, lse, chunks, out_RHC)
