"""Triton kernel for the second product of LoRA adapters: out += B[slot] h of each row with an adapter.

Programs as in `kernels.triton.lora_shrink`, each with one tile of the output's columns. A row has one slot, so no two
programs add to one value.

T rows, N output width, S slots, e local experts, E experts with matrices, r rank, Q values of h of all parts, Z pieces
of a sum.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.lora_shrink import experts_of

BLOCK_M, BLOCK_N = 32, 128


@triton.jit
def _expand(out_at, b_at, h, here, in_rank, in_tile):
    """Add B h to the rows `here`."""
    b = tl.load(b_at, mask=in_rank[:, None] & in_tile[None, :], other=0)
    delta = tl.dot(h.to(b.dtype), b, input_precision="ieee")
    stored = here[:, None] & in_tile[None, :]
    before = tl.load(out_at, mask=stored, other=0)
    tl.store(out_at, (before + delta).to(before.dtype), mask=stored)


@triton.jit(do_not_specialize=["num_rows", "slots_ptr", "experts_ptr", "places_ptr"])
def lora_expand_kernel(
    out_ptr,
    out_stride,
    h_ptr,
    b_ptr,
    b_stride,
    slots_ptr,
    experts_ptr,
    places_ptr,
    tiles_ptr,
    num_rows,
    width,
    height,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
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
        h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLITS):
            piece_at = h_at + (split * num_rows).to(tl.int64) * width
            h += tl.load(piece_at, mask=mine[:, None] & in_rank[None, :], other=0)
        b_at = b_ptr + slot.to(tl.int64) * b_stride + columns[None, :] * RANK + ranks[:, None]
        out_at = out_ptr + rows[:, None].to(tl.int64) * out_stride + columns[None, :]
        if EXPERTS:
            expert, lowest, highest = experts_of(experts_ptr, rows, mine)
            for number in range(lowest, highest + 1):
                here = mine & (expert == number)
                if tl.sum(here.to(tl.int32), 0) > 0:
                    own_at = b_at + tl.load(places_ptr + number).to(tl.int64) * height * RANK
                    _expand(out_at, own_at, h, here, in_rank, in_tile)
        else:
            _expand(out_at, b_at, h, mine, in_rank, in_tile)


def lora_expand(
    out_TN: torch.Tensor,
    h_ZTQ: torch.Tensor,
    b_SNr: torch.Tensor,
    slots_T: torch.Tensor,
    tiles: torch.Tensor,
    experts: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Add B[slot] h to the rows of `out` that have an adapter, in place.

    out_TN     rows may be strided
    h_ZTQ      float32, of `lora_shrink`
    b_SNr      of the dtype of out, contiguous but for the stride of slots; with experts [S, E, N, r]
    slots_T    int64, slots from 1 on, 0 for none
    tiles      int32 [tiles, 3]: first column, end column, part
    experts    as of `lora_shrink`
    """
    num_rows, num_slots, (height, rank) = len(out_TN), len(b_SNr), b_SNr.shape[-2:]
    assert out_TN.stride(1) == 1 and b_SNr[0].is_contiguous() and tiles.is_contiguous()
    assert b_SNr.dim() == (3 if experts is None else 4), b_SNr.shape
    if num_rows:
        lora_expand_kernel[triton.cdiv(num_rows, BLOCK_M), num_slots, len(tiles)](
            out_TN,
            out_TN.stride(0),
            h_ZTQ,
            b_SNr,
            b_SNr.stride(0),
            slots_T,
            *(experts or (slots_T, slots_T)),
            tiles,
            num_rows,
            h_ZTQ.shape[2],
            height,
            SPLITS=h_ZTQ.shape[0],
            RANK=rank,
            EXPERTS=experts is not None,
            BLOCK_M=BLOCK_M,
            BLOCK_R=max(16, triton.next_power_of_2(rank)),
            BLOCK_N=BLOCK_N,
        )
