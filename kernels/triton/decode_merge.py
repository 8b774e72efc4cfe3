"""The chunks of decodes on the device, and the merge of a row's chunks.

R rows, a decode each; C chunks; H query heads, d head dim; I tiles of rows with shared keys, P partial results of them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNKS = 16  # at a time: one after the other, each would wait for memory


@triton.jit
def _add(
    partial_ptr,
    lse_ptr,
    part,
    used,
    head,
    softmax,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
):
    """Return maximum, sum and output of the softmax so far merged with further partial results of one head."""
    top, total, out = softmax
    value = tl.arange(0, HEAD_DIM_2)
    at = part * NUM_HEADS + head
    lse = tl.load(lse_ptr + at, mask=used, other=float("-inf"))
    found_at = partial_ptr + at[:, None].to(tl.int64) * HEAD_DIM + value[None, :]
    found = tl.load(found_at, mask=used[:, None] & (value < HEAD_DIM)[None, :], other=0)
    new_top = tl.maximum(top, tl.max(lse, 0))
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weight, decay = tl.exp(lse - floor), tl.exp(top - floor)
    out = out * decay + tl.sum(found * weight[:, None], 0)
    return new_top, total * decay + tl.sum(weight, 0), out


@triton.jit(do_not_specialize=["starts_ptr", "parts_ptr", "num_parts_ptr"])
def merge_chunks_kernel(
    partial_ptr,
    lse_ptr,
    starts_ptr,
    shared_ptr,
    shared_lse_ptr,
    parts_ptr,
    num_parts_ptr,
    out_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """One head of one row: the softmax over all chunks of the row. TILE_ROWS 0: no row has shared keys."""
    row, head = tl.program_id(0), tl.program_id(1)
    value = tl.arange(0, HEAD_DIM_2)
    out = tl.zeros((HEAD_DIM_2,), tl.float32)
    top, total = float("-inf"), 0.0
    end = tl.load(starts_ptr + row + 1)
    for first in range(tl.load(starts_ptr + row), end, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        so_far = (top, total, out)
        top, total, out = _add(
            *(partial_ptr, lse_ptr, chunk, chunk < end, head, so_far),
            *(NUM_HEADS, HEAD_DIM, HEAD_DIM_2),
        )
    if TILE_ROWS:
        first_part, num_parts = tl.load(parts_ptr + row), tl.load(num_parts_ptr + row)
        for first in range(0, num_parts, CHUNKS):
            number = first + tl.arange(0, CHUNKS)
            so_far = (top, total, out)
            top, total, out = _add(
                *(shared_ptr, shared_lse_ptr, first_part + number * TILE_ROWS),
                *(number < num_parts, head, so_far, NUM_HEADS, HEAD_DIM, HEAD_DIM_2),
            )
    out = out / tl.where(total == 0, 1.0, total)
    out_at = (row * NUM_HEADS + head).to(tl.int64) * HEAD_DIM + value
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=value < HEAD_DIM)


@dataclass(frozen=True)
class SharedTiles:
    """`SharedChunks` on the device; tile_rows as there.

    partial  float32 [P, H, d] and its log-sum-exps have tile_rows places for each tile
    """

    rows: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    parts: torch.Tensor
    num_parts: torch.Tensor
    tile_rows: int


@dataclass(frozen=True)
class Chunks:
    """`DecodeChunks` on the device, with the block table of the rows; cut: a row may have several chunks.

    block_table  int64 [>= R, max_blocks]; entries that no chunk has may be any
    shared       keys before the chunks that rows share; None: there are none, as where rows are not cut
    """

    seqs: torch.Tensor
    firsts: torch.Tensor
    ends: torch.Tensor
    starts: torch.Tensor
    block_table: torch.Tensor
    cut: bool
    shared: SharedTiles | None = None


def merge_chunks(
    partial_CHd: torch.Tensor,
    lse_CH: torch.Tensor,
    chunks: Chunks,
    out_RHd: torch.Tensor,
    shared_parts: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the softmax over all chunks of each row to out_RHd. partial, lse: float32, of each chunk.

    shared_parts   float32 [P, H, d] and [P, H], those of the shared keys, if rows have any
    """
    num_rows, num_heads, head_dim = out_RHd.shape
    shared = chunks.shared
    parts = [chunks.starts] * 2 if shared is None else [shared.parts, shared.num_parts]
    merge_chunks_kernel[(num_rows, num_heads)](
        *(partial_CHd, lse_CH, chunks.starts, *(shared_parts or (partial_CHd, lse_CH)), *parts),
        out_RHd,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_2=max(16, triton.next_power_of_2(head_dim)),
        CHUNKS=CHUNKS,
        TILE_ROWS=0 if shared is None else shared.tile_rows,
        num_warps=1,
    )
