"""Triton kernel for the second product of LoRA adapters of routed experts: out += B[slot, expert] h of each row.

A program has some rows of one expert and one tile of the output's columns. It goes through the slots that its rows
have, and reads and writes the output once.

R permuted rows, N output width, S slots, E experts with matrices, r rank, Q values of h of all parts, Z pieces of a
sum.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.expert_lora_shrink import NO_SLOT, next_slot, rows_of_tile
from kernels.triton.expert_lora_tiles import ExpertTiles
from kernels.triton.lora_expand import sum_pieces


@triton.jit(do_not_specialize=["num_rows"])
def expert_lora_expand_kernel(
    out_ptr,
    out_stride,
    h_ptr,
    b_ptr,
    b_stride,
    bounds_ptr,
    slots_ptr,
    places_ptr,
    columns_ptr,
    num_rows,
    width,
    height,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add one tile of columns of the rows of one tile that have a slot."""
    expert, permuted, slots = rows_of_tile(bounds_ptr, slots_ptr, tl.program_id(0), BLOCK_M)
    slot = next_slot(slots, 0)
    if slot < NO_SLOT:
        tile_at = columns_ptr + tl.program_id(1) * 3
        first, end, part = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
        ranks = tl.arange(0, BLOCK_R)
        columns = first + tl.arange(0, BLOCK_N)
        in_rank, in_tile, mine = ranks < RANK, columns < end, slots > 0
        out_at = out_ptr + permuted[:, None] * out_stride + columns[None, :]
        stored = mine[:, None] & in_tile[None, :]
        before = tl.load(out_at, mask=stored, other=0)
        h_at = h_ptr + permuted[:, None] * width + (part * RANK + ranks)[None, :]
        h = sum_pieces(h_at, mine[:, None] & in_rank[None, :], num_rows, width, SPLITS)
        place = tl.load(places_ptr + expert).to(tl.int64)
        b_at = b_ptr + (place * height + columns)[None, :] * RANK + ranks[:, None]
        delta = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        while slot < NO_SLOT:
            own_at = b_at + tl.cast(slot - 1, tl.int64) * b_stride
            b = tl.load(own_at, mask=in_rank[:, None] & in_tile[None, :], other=0)
            own_h = tl.where((slots == slot)[:, None], h, 0.0).to(b.dtype)
            delta = tl.dot(own_h, b, delta, input_precision="ieee")
            slot = next_slot(slots, slot)
        tl.store(out_at, (before + delta).to(before.dtype), mask=stored)


def expert_lora_expand(
    out_RN: torch.Tensor,
    h_ZRQ: torch.Tensor,
    b_SENr: torch.Tensor,
    tiles: ExpertTiles,
    places_e: torch.Tensor,
    columns_C3: torch.Tensor,
    most_columns: int,
) -> None:
    """Add B[slot, expert] h to the rows of `out` that have an adapter, in place.

    out_RN       rows may be strided
    h_ZRQ        float32, of `expert_lora_shrink` with the same tiles and places
    b_SENr       of the dtype of out, contiguous but for the stride of slots
    columns_C3   int32: first column, end column and part of each tile of columns, of `most_columns` at most
    """
    num_rows, (height, rank) = len(out_RN), b_SENr.shape[2:]
    assert out_RN.stride(1) == 1 and b_SENr[0].is_contiguous() and columns_C3.is_contiguous()
    assert num_rows == len(tiles.row_R), out_RN.shape
    if num_rows:
        expert_lora_expand_kernel[len(tiles.bounds_t3), len(columns_C3)](
            *(out_RN, out_RN.stride(0), h_ZRQ, b_SENr, b_SENr.stride(0)),
            *(tiles.bounds_t3, tiles.slots_R, places_e, columns_C3),
            *(num_rows, h_ZRQ.shape[2], height),
            SPLITS=h_ZRQ.shape[0],
            RANK=rank,
            BLOCK_M=tiles.block_rows,
            BLOCK_R=max(16, triton.next_power_of_2(rank)),
            BLOCK_N=triton.next_power_of_2(most_columns),
        )
