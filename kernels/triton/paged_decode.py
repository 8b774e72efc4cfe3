"""Attention of decodes over pages, in chunks of keys, which `decode_merge` merges.

A program computes the G query heads that share a KV head, for the keys of one chunk, and reads no key before it. Keys
are the rows of its products and query heads the columns, so that 8 heads fill a tensor core's tile.
The scale of a key in e4m3 multiplies its scores, that of a value its weight; the maximum is that of both, so that no
weight exceeds 1. Leading keys that rows share are left to `shared_decode`.

R rows, a decode each; C chunks; H query heads, h KV heads, G = H / h, d head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.decode_merge import Chunks, merge_chunks
from kernels.triton.fp8_heads import e4m3_values, packed_words, power_of_two
from kernels.triton.page_tiles import LOG2_E, blocks_of, load_tile
from kernels.triton.shared_decode import shared_decode

COLUMNS = 8  # fewest columns of a product


@dataclass(frozen=True)
class DecodeForm:
    """Keys at a time, warps of a program, the most registers of a thread, and programs that an SM holds at a time."""

    keys: int
    num_warps: int
    registers: int | None = None
    programs_per_sm: int = 4


HALF = DecodeForm(64, 2)
# With 128 registers four programs fit on an SM: 512 programs (128 sequences, 4 KV heads) then run at a time on 132 SMs,
# not in two rounds, of which the second is short.
E4M3 = DecodeForm(128, 4, registers=128)
# Programs of one warp, a kernel of its own (kernels.triton.warp_decode_fp8). `DecodeForms` chooses it.
E4M3_WARPS = DecodeForm(32, 1, registers=128, programs_per_sm=16)


@triton.jit
def _query(
    q_ptr,
    sinks_ptr,
    begins,
    query_head,
    used,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Return q [d, G], the power of two that its columns were divided by, maximum and sum of the sinks.

    q is float16 beside pages in e4m3, where it is not float32; else in its own dtype and not divided.
    begins: the chunk is the first of its row, because a sink counts once.
    """
    value = tl.arange(0, HEAD_DIM_2)
    mask = used[None, :] & (value < HEAD_DIM)[:, None]
    q = tl.load(q_ptr + query_head[None, :] * HEAD_DIM + value[:, None], mask=mask, other=0)
    factor = tl.full((q.shape[1],), 1.0, tl.float32)
    if FP8 and q.dtype != tl.float32:
        wide = q.to(tl.float32)
        exponent = tl.max(tl.abs(wide), 0).to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        factor = power_of_two(exponent)
        q = (wide * power_of_two(254 - exponent)[None, :]).to(tl.float16)
    top = tl.full((q.shape[1],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[1],), tl.float32)
    if SINKS:
        sinks = tl.load(sinks_ptr + query_head, mask=used, other=0).to(tl.float32) * LOG2_E
        top, total = tl.where(begins, sinks, top), tl.where(begins, total + 1, total)
    return q, factor, top, total


@triton.jit
def _merge(q, factor, loaded, seen, top, total, out, FP8: tl.constexpr):
    """Return the softmax so far merged with loaded keys."""
    k, v, k_exponent, v_exponent = loaded
    precision: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    scores = tl.dot(e4m3_values(k, q.dtype), q, input_precision=precision) * factor[None, :]
    if FP8:
        scores *= power_of_two(k_exponent)[:, None]
        scores += (v_exponent - 127).to(tl.float32)[:, None]
    scores = tl.where(seen[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - floor[None, :])
    decay = tl.exp2(top - floor)
    if FP8:
        total = total * decay + tl.sum(weights * power_of_two(254 - v_exponent)[:, None], 0)
    else:
        total = total * decay + tl.sum(weights, 0)
    v_dN, weights = e4m3_values(v, q.dtype).T, weights.to(q.dtype)
    out = tl.dot(v_dN, weights, out * decay[None, :], input_precision=precision)
    return new_top, total, out


@triton.jit(
    do_not_specialize=[
        *("q_row", "table_ptr", "table_row", "seq_ptr", "first_ptr", "end_ptr", "starts_ptr"),
        "sinks_ptr",
    ]
)
def paged_decode_kernel(
    q_ptr,
    q_row,
    k_ptr,
    v_ptr,
    k_exponents_ptr,
    v_exponents_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    table_row,
    seq_ptr,
    first_ptr,
    end_ptr,
    starts_ptr,
    sinks_ptr,
    scale,
    SINKS: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    FP8: tl.constexpr,
):
    """One chunk for one KV head. PARTIAL: rows may have several chunks, which a merge follows."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(seq_ptr + chunk)
    if seq < 0:
        return
    first, end = tl.load(first_ptr + chunk), tl.load(end_ptr + chunk)
    column = tl.arange(0, COLUMNS)
    query_head, used = head * GROUP + column, column < GROUP
    q_ptr += seq.to(tl.int64) * q_row
    begins = tl.load(starts_ptr + seq) == chunk
    q, factor, top, total = _query(
        q_ptr, sinks_ptr, begins, query_head, used, HEAD_DIM, HEAD_DIM_2, SINKS, FP8
    )
    factor *= scale * LOG2_E
    out = tl.zeros(q.shape, tl.float32)
    caches = (k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr)
    table_ptr += seq.to(tl.int64) * table_row
    key = first // KEYS * KEYS + tl.arange(0, KEYS)
    block = blocks_of(table_ptr, key, end, BLOCK_SIZE)
    for _ in tl.range(first // KEYS * KEYS, end, KEYS, num_stages=1):
        seen = (key >= first) & (key < end)
        tile = load_tile(
            caches, block, key, seen, head, BLOCK_SIZE, HEADS, HEAD_DIM, HEAD_DIM_2, FP8
        )
        key += KEYS
        block = blocks_of(table_ptr, key, end, BLOCK_SIZE)
        top, total, out = _merge(q, factor, tile, seen, top, total, out, FP8)
    of = (chunk, seq, query_head, used)
    _store(out_ptr, lse_ptr, of, top, total, out, HEADS * GROUP, HEAD_DIM, HEAD_DIM_2, PARTIAL)


@triton.jit
def _store(
    out_ptr,
    lse_ptr,
    of,
    top,
    total,
    out,
    ALL_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Store the output of the row, or that of the chunk with its log-sum-exp in base e."""
    chunk, seq, query_head, used = of
    total = tl.where(total == 0, 1.0, total)
    out = out / total[None, :]
    at = seq
    if PARTIAL:
        at = chunk
        lse = tl.where(top == float("-inf"), top, (top + tl.log2(total)) / LOG2_E)
        tl.store(lse_ptr + chunk * ALL_HEADS + query_head, lse, mask=used)
    value = tl.arange(0, HEAD_DIM_2)
    mask = used[None, :] & (value < HEAD_DIM)[:, None]
    out_at = at.to(tl.int64) * (ALL_HEADS * HEAD_DIM)
    out_at += query_head[None, :] * HEAD_DIM + value[:, None]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


def paged_decode(
    q_RHd: torch.Tensor,
    caches: Sequence[torch.Tensor],
    out_RHd: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
    sinks_H: torch.Tensor | None,
    form: DecodeForm | None = None,
) -> None:
    """Write the attention of all rows to out_RHd; K and V of the new tokens are in the cache already.

    q        rows of contiguous heads, any stride between rows; out is contiguous
    caches   K, V [num_blocks, block_size, h, d], in float8_e4m3fn with their exponents [num_blocks, h, block_size]
    sinks    float32 [H]
    form     None: E4M3 or HALF, as the caches are
    """
    num_rows, num_heads, head_dim = q_RHd.shape
    k_cache, v_cache, *exponents = caches
    _, block_size, num_kv_heads, _ = caches[0].shape
    group, num_chunks = num_heads // num_kv_heads, len(chunks.seqs)
    assert chunks.cut or chunks.shared is None, "shared keys are merged with chunks"
    assert q_RHd.stride()[1:] == (head_dim, 1) and out_RHd.is_contiguous()
    if not num_rows:
        return
    form = form or (E4M3 if exponents else HALF)
    if form == E4M3_WARPS:
        from kernels.triton.warp_decode_fp8 import warp_decode_fp8

        assert sinks_H is None and chunks.shared is None, "single warps serve neither"
        warp_decode_fp8(q_RHd, caches, out_RHd, chunks, scale=scale)
        return
    if exponents:
        k_cache, v_cache = packed_words(k_cache), packed_words(v_cache)
    partial, lse = out_RHd, out_RHd
    if chunks.cut:
        partial = q_RHd.new_empty(num_chunks, num_heads, head_dim, dtype=torch.float32)
        lse = partial.new_empty(num_chunks, num_heads)
    paged_decode_kernel[(num_chunks, num_kv_heads)](
        *(q_RHd, q_RHd.stride(0), k_cache, v_cache, *(exponents or (k_cache, v_cache))),
        *(partial, lse, chunks.block_table, chunks.block_table.stride(0)),
        *(chunks.seqs, chunks.firsts, chunks.ends, chunks.starts),
        *(lse if sinks_H is None else sinks_H, scale),
        SINKS=sinks_H is not None,
        PARTIAL=chunks.cut,
        BLOCK_SIZE=block_size,
        HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_2=max(16, triton.next_power_of_2(head_dim)),
        COLUMNS=max(COLUMNS, triton.next_power_of_2(group)),
        KEYS=form.keys,
        FP8=bool(exponents),
        num_warps=form.num_warps,
        maxnreg=form.registers,
    )
    if chunks.cut:
        tiles, table = chunks.shared, chunks.block_table
        parts = shared_decode(q_RHd, caches, tiles, table, scale=scale) if tiles else None
        merge_chunks(partial, lse, chunks, out_RHd, parts)
