"""Attention of decodes over pages, in chunks of keys, and the merge of a row's chunks.

A program computes the G query heads that share a KV head, for the keys of one chunk. It reads no key before the chunk.

R rows, a decode each; C chunks; H query heads, h KV heads, G = H / h, d head dim.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.paged_attention import KEYS, ROWS, attend

WARPS = 2  # 48 us with 2, 59 with 4 (128 sequences of 640 tokens, gpt-oss's heads, H200)


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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One chunk for one KV head. PARTIAL: rows may have several chunks, which a merge follows."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(seq_ptr + chunk)
    if seq < 0:
        return
    first, end = tl.load(first_ptr + chunk), tl.load(end_ptr + chunk)
    row = tl.arange(0, ROWS)
    query_head = head * GROUP + row
    value = tl.arange(0, HEAD_DIM_2)
    mask = (row < GROUP)[:, None] & (value < HEAD_DIM)[None, :]
    head_at = query_head[:, None] * HEAD_DIM + value[None, :]
    q = tl.load(q_ptr + seq.to(tl.int64) * q_row + head_at, mask=mask, other=0)
    begins = tl.load(starts_ptr + seq) == chunk  # a sink counts once
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        sinks = tl.load(sinks_ptr + query_head, mask=row < GROUP, other=0).to(tl.float32)
        top = tl.where(begins, sinks, top)
        total = tl.where(begins, total + 1, total)
    top, total, out = attend(
        *(q, k_ptr, v_ptr, k_ptr, v_ptr, table_ptr + seq.to(tl.int64) * table_row, top, total),
        *(first // KEYS * KEYS, end, first, end + tl.zeros((ROWS,), tl.int32), head),
        *(value, scale, 0, BLOCK_SIZE, HEADS, HEAD_DIM, KEYS, PRECISION, False),
    )
    total = tl.where(total == 0, 1.0, total)
    out = out / total[:, None]
    at = seq
    if PARTIAL:
        at = chunk
        lse = tl.where(top == float("-inf"), top, top + tl.log(total))
        tl.store(lse_ptr + chunk * (HEADS * GROUP) + query_head, lse, mask=row < GROUP)
    out_at = at.to(tl.int64) * (HEADS * GROUP * HEAD_DIM) + head_at
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["starts_ptr"])
def merge_chunks_kernel(
    partial_ptr,
    lse_ptr,
    starts_ptr,
    out_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
):
    """One head of one row: the softmax over all chunks of the row."""
    row, head = tl.program_id(0), tl.program_id(1)
    value = tl.arange(0, HEAD_DIM_2)
    mask = value < HEAD_DIM
    out = tl.zeros((HEAD_DIM_2,), tl.float32)
    top = tl.full((HEAD_DIM_2,), float("-inf"), tl.float32)
    total = tl.zeros((HEAD_DIM_2,), tl.float32)
    for chunk in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        at = chunk * NUM_HEADS + head
        lse = tl.load(lse_ptr + at)
        found = tl.load(partial_ptr + at.to(tl.int64) * HEAD_DIM + value, mask=mask, other=0)
        new_top = tl.maximum(top, lse)
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        weight, decay = tl.exp(lse - floor), tl.exp(top - floor)
        out = out * decay + found * weight
        total = total * decay + weight
        top = new_top
    out = out / tl.where(total == 0, 1.0, total)
    out_at = (row * NUM_HEADS + head).to(tl.int64) * HEAD_DIM + value
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Chunks:
    """`DecodeChunks` on the device, with the block table of the rows; cut: a row may have several chunks.

    block_table  int64 [>= R, max_blocks]; entries that no chunk has may be any
    """

    seqs: torch.Tensor
    firsts: torch.Tensor
    ends: torch.Tensor
    starts: torch.Tensor
    block_table: torch.Tensor
    cut: bool


def paged_decode(
    q_RHd: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_RHd: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
    sinks_H: torch.Tensor | None,
) -> None:
    """Write the attention of all rows to out_RHd; K and V of the new tokens are in the cache already.

    q             rows of contiguous heads, any stride between rows; out is contiguous
    k, v cache    [num_blocks, block_size, h, d]
    sinks         float32 [H]
    """
    num_rows, num_heads, head_dim = q_RHd.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    num_chunks, padded_dim = len(chunks.seqs), max(16, triton.next_power_of_2(head_dim))
    assert q_RHd.stride()[1:] == (head_dim, 1) and out_RHd.is_contiguous()
    if not num_rows:
        return
    partial, lse = out_RHd, out_RHd
    if chunks.cut:
        partial = q_RHd.new_empty(num_chunks, num_heads, head_dim, dtype=torch.float32)
        lse = partial.new_empty(num_chunks, num_heads)
    paged_decode_kernel[(num_chunks, num_kv_heads)](
        *(q_RHd, q_RHd.stride(0), k_cache, v_cache, partial, lse),
        *(chunks.block_table, chunks.block_table.stride(0)),
        *(chunks.seqs, chunks.firsts, chunks.ends, chunks.starts),
        *(lse if sinks_H is None else sinks_H, scale),
        SINKS=sinks_H is not None,
        PARTIAL=chunks.cut,
        BLOCK_SIZE=block_size,
        HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_2=padded_dim,
        ROWS=max(ROWS, triton.next_power_of_2(group)),
        KEYS=KEYS,
        PRECISION="ieee" if q_RHd.dtype == torch.float32 else "tf32",
        num_warps=WARPS,
    )
    if chunks.cut:
        merge_chunks(partial, lse, chunks, out_RHd)


def merge_chunks(
    partial_CHd: torch.Tensor, lse_CH: torch.Tensor, chunks: Chunks, out_RHd: torch.Tensor
) -> None:
    """Write the softmax over all chunks of each row to out_RHd. partial, lse: float32, of each chunk."""
    num_rows, num_heads, head_dim = out_RHd.shape
    merge_chunks_kernel[(num_rows, num_heads)](
        *(partial_CHd, lse_CH, chunks.starts, out_RHd),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_2=max(16, triton.next_power_of_2(head_dim)),
        num_warps=1,
    )
