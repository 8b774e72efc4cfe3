"""Attention of decodes over pages of latents in e4m3 (MLA), in chunks of keys, which `decode_merge` merges.

A latent is key and value of all heads, so a program reads it once for up to MOST_HEADS heads: the rows of its products,
the keys are the columns. Latents become bfloat16 in registers, exactly, and lie in shared memory once for both
products; the next ones are loaded, as packed words, while the present ones are multiplied. The scale of a latent
multiplies the part of its scores that comes from it, and its weight; the maximum is that of both, so that no weight
exceeds 1.

R rows, a decode each; H heads, C values of a latent, r of a rotated key; chunks as in `decode_merge`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from kernels.triton.decode_merge import Chunks, merge_chunks
from kernels.triton.fp8_heads import E4M3_TO_BFLOATS, packed_words, power_of_two

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
# Heads of a program of this kernel. With 64 the sums over 512 values leave too few registers of an SM.
FEWEST_HEADS, MOST_HEADS = 16, 32


@dataclass(frozen=True)
class LatentForm:
    """Keys at a time, warps of a program, the most heads of a program, and the most registers of a thread."""

    keys: int
    num_warps: int
    heads: int = MOST_HEADS
    registers: int | None = None


FORM = LatentForm(64, 8)
# A kernel of its own (kernels.triton.hopper_latent_decode). 128 decodes of 1,536 keys took 220 us in place of 546 on an
# H100 with DeepSeek-V3's 128 heads, and 116 in place of 141 with GLM-4.7-Flash's 20.
WIDE = LatentForm(64, 8, 64)


@triton.jit
def _bfloats(words):
    """int32 [N, W] -> bfloat16 [N, 4 W], the e4m3 values of each word in order of memory; NaN becomes 480."""
    a, b, c, d = tl.inline_asm_elementwise(
        E4M3_TO_BFLOATS,
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )
    joined = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(joined, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def _load(
    caches,
    table_ptr,
    key,
    first,
    end,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_2: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_2: tl.constexpr,
):
    """Return latents, rotated keys and exponents of these keys as they lie in the cache, zeros outside of the chunk."""
    values_ptr, keys_ptr, exponents_ptr = caches
    unit: tl.constexpr = 4 if values_ptr.dtype.element_ty == tl.int32 else 1
    seen = (key >= first) & (key < end)
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + key % BLOCK_SIZE
    word, value = tl.arange(0, RANK_2 // unit), tl.arange(0, ROPE_2)
    values_at = values_ptr + slot[:, None] * (RANK // unit) + word[None, :]
    values = tl.load(values_at, mask=seen[:, None] & (word < RANK // unit)[None, :], other=0.0)
    keys_at = keys_ptr + slot[:, None] * ROPE + value[None, :]
    keys = tl.load(keys_at, mask=seen[:, None] & (value < ROPE)[None, :], other=0.0)
    return values, keys, tl.load(exponents_ptr + slot, mask=seen, other=127)


@triton.jit
def _dot(x, y, total):
    """Return total + x @ y."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit
def _queries(q_ptr, row, stride, head, used, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr):
    """Return [HEADS, w]: the queries of these heads, zeros for heads that are not used."""
    value = tl.arange(0, WIDTH_2)
    mask = used[:, None] & (value < WIDTH)[None, :]
    return tl.load(q_ptr + row + head[:, None] * stride + value[None, :], mask=mask, other=0)


@triton.jit
def _wide(values, dtype):
    """Return words or values of e4m3 in `dtype`."""
    wide = _bfloats(values) if values.dtype == tl.int32 else values.to(tl.float32)
    return wide.to(dtype)


@triton.jit
def _merge(q, rope, scale, loaded, seen, top, total, out):
    """Return the softmax so far merged with loaded keys."""
    latents, keys, exponent = loaded
    exponent = exponent.to(tl.int32)
    scores = _dot(q, latents.T, tl.zeros((q.shape[0], latents.shape[0]), tl.float32))
    scores = _dot(rope, keys.T, scores * power_of_two(exponent)[None, :]) * scale
    scores += (exponent - 127).to(tl.float32)[None, :]
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights, decay = tl.exp2(scores - floor[:, None]), tl.exp2(top - floor)
    total = total * decay + tl.sum(weights * power_of_two(254 - exponent)[None, :], 1)
    return new_top, total, _dot(weights.to(q.dtype), latents, out * decay[:, None])


@triton.jit(
    do_not_specialize=["table_ptr", "table_row", "seq_ptr", "first_ptr", "end_ptr", "q_row"]
)
def latent_decode_kernel(
    q_ptr,
    q_row,
    q_head,
    rope_ptr,
    rope_row,
    rope_head,
    values_ptr,
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
    PARTIAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_2: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_2: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One chunk for HEADS heads; programs of one chunk follow each other, so that the L2 cache serves all but one."""
    head, chunk = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.program_id(1)
    seq = tl.load(seq_ptr + chunk).to(tl.int64)
    if seq < 0:
        return
    first, end = tl.load(first_ptr + chunk), tl.load(end_ptr + chunk)
    used = head < NUM_HEADS
    q = _queries(q_ptr, seq * q_row, q_head, head, used, RANK, RANK_2)
    rope = _queries(rope_ptr, seq * rope_row, rope_head, head, used, ROPE, ROPE_2)
    scale *= LOG2_E
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    out = tl.zeros(q.shape, tl.float32)
    caches = (values_ptr, keys_ptr, exponents_ptr)
    table_ptr += seq * table_row
    start = first // KEYS * KEYS
    key = start + tl.arange(0, KEYS)
    tile = _load(caches, table_ptr, key, first, end, BLOCK_SIZE, RANK, RANK_2, ROPE, ROPE_2)
    # Converted a turn ahead: only of values that enter a turn does Triton keep one copy for both products.
    latents = _wide(tile[0], q.dtype)
    keys, exponent = tile[1], tile[2]
    for _ in tl.range(start, end, KEYS, num_stages=1):
        seen = (key >= first) & (key < end)
        key += KEYS
        tile = _load(caches, table_ptr, key, first, end, BLOCK_SIZE, RANK, RANK_2, ROPE, ROPE_2)
        loaded = (latents, keys, exponent)
        top, total, out = _merge(q, rope, scale, loaded, seen, top, total, out)
        latents = _wide(tile[0], q.dtype)
        keys, exponent = tile[1], tile[2]
    at = chunk.to(tl.int64) if PARTIAL else seq
    of = (at * NUM_HEADS + head, used)
    _store(out_ptr, lse_ptr, of, top, total, out, RANK, PARTIAL)


@triton.jit
def _store(out_ptr, lse_ptr, of, top, total, out, RANK: tl.constexpr, PARTIAL: tl.constexpr):
    """Store the outputs of heads; with PARTIAL also the log-sum-exps of the chunk in base e."""
    row, used = of
    total = tl.where(total == 0, 1.0, total)
    if PARTIAL:
        lse = tl.where(top == float("-inf"), top, (top + tl.log2(total)) / LOG2_E)
        tl.store(lse_ptr + row, lse, mask=used)
    value = tl.arange(0, out.shape[1])
    out_at = out_ptr + row[:, None] * RANK + value[None, :]
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at, out, mask=used[:, None] & (value < RANK)[None, :])


def form_of(num_heads: int) -> LatentForm:
    """Return the form for decodes of this many heads."""
    return WIDE if num_heads > FEWEST_HEADS else FORM


def heads_of_program(num_heads: int, form: LatentForm) -> int:
    """Return the heads of a program, a power of two."""
    if form == WIDE:
        return WIDE.heads
    return max(FEWEST_HEADS, min(form.heads, triton.next_power_of_2(num_heads)))


def head_parts(num_heads: int, form: LatentForm | None = None) -> int:
    """Return the programs that share a chunk; form: None is that of `form_of`."""
    return -(-num_heads // heads_of_program(num_heads, form or form_of(num_heads)))


def latent_decode(
    q_RHC: torch.Tensor,
    rope_RHr: torch.Tensor,
    caches: Sequence[torch.Tensor],
    out_RHC: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
    form: LatentForm | None = None,
) -> None:
    """Write the attention of all rows to out_RHC; the latents of the new tokens are in the cache already.

    q        queries on latents (absorbed), any strides between rows and heads; out is contiguous
    rope     rotated part of the queries, likewise
    caches   latents float8_e4m3fn [num_blocks, block_size, C], rotated keys [num_blocks, block_size, r], exponents
             uint8 [num_blocks, block_size], contiguous
    form     None: that of `form_of`
    """
    num_rows, num_heads, rank = q_RHC.shape
    values, keys, exponents = caches
    num_chunks, rope_dim = len(chunks.seqs), rope_RHr.shape[2]
    assert q_RHC.stride(2) == rope_RHr.stride(2) == 1 and out_RHC.is_contiguous()
    assert all(it.is_contiguous() for it in caches) and keys.shape[2] == rope_dim
    if not num_rows:
        return
    form = form or form_of(num_heads)
    if form == WIDE:
        from kernels.triton.hopper_latent_decode import hopper_latent_decode

        hopper_latent_decode(q_RHC, rope_RHr, caches, out_RHC, chunks, scale=scale)
        return
    heads = heads_of_program(num_heads, form)
    partial, lse = out_RHC, out_RHC
    if chunks.cut:
        partial = q_RHC.new_empty(num_chunks, num_heads, rank, dtype=torch.float32)
        lse = partial.new_empty(num_chunks, num_heads)
    latent_decode_kernel[(triton.cdiv(num_heads, heads), num_chunks)](
        *(q_RHC, q_RHC.stride(0), q_RHC.stride(1)),
        *(rope_RHr, rope_RHr.stride(0), rope_RHr.stride(1)),
        *(packed_words(values), keys, exponents, partial, lse),
        *(chunks.block_table, chunks.block_table.stride(0)),
        *(chunks.seqs, chunks.firsts, chunks.ends, scale),
        PARTIAL=chunks.cut,
        BLOCK_SIZE=values.shape[1],
        NUM_HEADS=num_heads,
        RANK=rank,
        RANK_2=max(16, triton.next_power_of_2(rank)),
        ROPE=rope_dim,
        ROPE_2=max(16, triton.next_power_of_2(rope_dim)),
        HEADS=heads,
        KEYS=form.keys,
        num_warps=form.num_warps,
        maxnreg=form.registers,
    )
    if chunks.cut:
        merge_chunks(partial, lse, chunks, out_RHC)
