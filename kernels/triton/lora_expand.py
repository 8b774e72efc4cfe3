"""Triton kernel for the second product of LoRA adapters: out += B[slot] h of each row with an adapter.

Programs as in `kernels.triton.lora_shrink`, each with one tile of the output's columns. A row has one slot, so no two
programs add to one value.

T rows, N output width, S slots, r rank, Q values of h of all parts, Z pieces of a sum.
"""

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N = 32, 128


@triton.jit
def sum_pieces(h_at, mask, num_rows, width, SPLITS: tl.constexpr):
    """Return float32 of the shape of `h_at`: the sum of the pieces of h, which the first product has left."""
    h = tl.zeros(mask.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        h += tl.load(h_at + (split * num_rows).to(tl.int64) * width, mask=mask, other=0)
    return h


@triton.jit(do_not_specialize=["num_rows", "slots_ptr"])
def lora_expand_kernel(
    out_ptr,
    out_stride,
    h_ptr,
    b_ptr,
    b_stride,
    slots_ptr,
    tiles_ptr,
    num_rows,
    width,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add one tile of columns of the rows that have the program's slot."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.program_id(1)
    mine = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0) == slot + 1
    if tl.sum(mine.to(tl.int32), 0) > 0:
        tile_at = tiles_ptr + tl.program_id(2) * 3
        first, end, part = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
        ranks = tl.arange(0, BLOCK_R)
        columns = first + tl.arange(0, BLOCK_N)
        in_rank, in_tile = ranks < RANK, columns < end
        h_at = h_ptr + rows[:, None].to(tl.int64) * width + (part * RANK + ranks)[None, :]
        h = sum_pieces(h_at, mine[:, None] & in_rank[None, :], num_rows, width, SPLITS)
        b_at = b_ptr + slot.to(tl.int64) * b_stride + columns[None, :] * RANK + ranks[:, None]
        out_at = out_ptr + rows[:, None].to(tl.int64) * out_stride + columns[None, :]
        b = tl.load(b_at, mask=in_rank[:, None] & in_tile[None, :], other=0)
        delta = tl.dot(h.to(b.dtype), b, input_precision="ieee")
        stored = mine[:, None] & in_tile[None, :]
        before = tl.load(out_at, mask=stored, other=0)
        tl.store(out_at, (before + delta).to(before.dtype), mask=stored)


def lora_expand(
    out_TN: torch.Tensor,
    h_ZTQ: torch.Tensor,
    b_SNr: torch.Tensor,
    slots_T: torch.Tensor,
    tiles: torch.Tensor,
) -> None:
    """Add B[slot] h to the rows of `out` that have an adapter, in place.

    out_TN     rows may be strided
    h_ZTQ      float32, of `lora_shrink`
    b_SNr      of the dtype of out, contiguous but for the stride of slots
    slots_T    int64, slots from 1 on, 0 for none
    tiles      int32 [tiles, 3]: first column, end column, part
    """
    num_rows, (num_slots, _, rank) = len(out_TN), b_SNr.shape
    assert out_TN.stride(1) == 1 and b_SNr[0].is_contiguous() and tiles.is_contiguous()
    if num_rows:
        lora_expand_kernel[triton.cdiv(num_rows, BLOCK_M), num_slots, len(tiles)](
            out_TN,
            out_TN.stride(0),
            h_ZTQ,
            b_SNr,
            b_SNr.stride(0),
            slots_T,
            tiles,
            num_rows,
            h_ZTQ.shape[2],
            SPLITS=h_ZTQ.shape[0],
            RANK=rank,
            BLOCK_M=BLOCK_M,
            BLOCK_R=max(16, triton.next_power_of_2(rank)),
            BLOCK_N=BLOCK_N,
        )
