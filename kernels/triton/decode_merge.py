"""The chunks of decodes on the device, and the merge of a row's chunks.

R rows, a decode each; C chunks; H query heads, d head dim.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNKS = 16  # at a time: one after the other, each would wait for memory


@triton.jit(do_not_specialize=["starts_ptr"])
def merge_chunks_kernel(
    partial_ptr,
    lse_ptr,
    starts_ptr,
    out_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One head of one row: the softmax over all chunks of the row."""
    row, head = tl.program_id(0), tl.program_id(1)
    value = tl.arange(0, HEAD_DIM_2)
    mask = value < HEAD_DIM
    out = tl.zeros((HEAD_DIM_2,), tl.float32)
    top, total = float("-inf"), 0.0
    end = tl.load(starts_ptr + row + 1)
    for first in range(tl.load(starts_ptr + row), end, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        at, used = chunk * NUM_HEADS + head, chunk < end
        lse = tl.load(lse_ptr + at, mask=used, other=float("-inf"))
        found_at = partial_ptr + at[:, None].to(tl.int64) * HEAD_DIM + value[None, :]
        found = tl.load(found_at, mask=used[:, None] & mask[None, :], other=0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        weight, decay = tl.exp(lse - floor), tl.exp(top - floor)
        out = out * decay + tl.sum(found * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
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
        CHUNKS=CHUNKS,
        num_warps=1,
    )
