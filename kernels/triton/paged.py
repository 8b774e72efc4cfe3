"""Triton kernels beside paged attention: they write new K and V to slots, and block tables to one list of pages.

T tokens, B sequences, h KV heads, d head dim, P pages.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots_ptr", "num_tokens"])
def _store_kv(
    k_ptr,
    v_ptr,
    k_row,
    v_row,
    slots_ptr,
    num_tokens,
    k_slots_ptr,
    v_slots_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    column = tl.arange(0, BLOCK)
    mask = (column < WIDTH) & (slot >= 0)
    k = tl.load(k_ptr + token * k_row + column, mask=mask)
    v = tl.load(v_ptr + token * v_row + column, mask=mask)
    tl.store(k_slots_ptr + slot * WIDTH + column, k, mask=mask)
    tl.store(v_slots_ptr + slot * WIDTH + column, v, mask=mask)


def store_kv(
    k_Thd: torch.Tensor,
    v_Thd: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Copy each token's K and V to its slot of the caches [num_blocks, block_size, h, d].

    k, v       rows of contiguous heads, any stride between rows
    slots      int64 [up to T]: block * block_size + offset, -1 for none; rows beyond `slots` are not copied
    """
    num_rows, num_kv_heads, head_dim = k_Thd.shape
    assert k_Thd.stride()[1:] == v_Thd.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    if len(slots):
        width = num_kv_heads * head_dim
        _store_kv[(min(num_rows, len(slots)),)](
            k_Thd,
            v_Thd,
            k_Thd.stride(0),
            v_Thd.stride(0),
            slots,
            len(slots),
            k_cache,
            v_cache,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1 if width <= 1024 else 4,
        )


@triton.jit(
    do_not_specialize=[
        *("table_ptr", "table_row", "starts_ptr", "pages_ptr"),
        *("slots_ptr", "num_slots", "padded_slots_ptr"),
    ]
)
def _list_pages(
    table_ptr,
    table_row,
    starts_ptr,
    pages_ptr,
    slots_ptr,
    num_slots,
    padded_slots_ptr,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
):
    seq = tl.program_id(0)
    if PAD:
        slot = tl.load(slots_ptr + seq, mask=seq < num_slots, other=-1)
        tl.store(padded_slots_ptr + seq, slot)
    start = tl.load(starts_ptr + seq)
    count = tl.load(starts_ptr + seq + 1) - start
    row_ptr = table_ptr + seq.to(tl.int64) * table_row
    for first in range(0, count, BLOCK):
        page = first + tl.arange(0, BLOCK)
        mask = page < count
        block = tl.load(row_ptr + page, mask=mask)
        tl.store(pages_ptr + start + page, block.to(tl.int32), mask=mask)


def list_pages(
    block_table: torch.Tensor,
    starts: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor | None = None,
    padded_slots: torch.Tensor | None = None,
) -> None:
    """Write the used entries of each row of the block table, row after row; nothing is copied to the host.

    block_table   int64 [B, max_blocks], the blocks of a row side by side; without rows, any strides
    starts        int32 [R + 1], R >= B: index of each row's first entry in `pages`; rows from B on have no entries
    pages         int32 [>= P], written
    padded_slots  int64 [R], written if given: slots [up to R], then -1
    """
    num_seqs, num_rows = block_table.shape[0], starts.shape[0] - 1
    assert num_seqs <= num_rows and (not num_seqs or block_table.stride(1) == 1)
    pad = slots is not None and padded_slots is not None
    num_slots = len(slots) if slots is not None else 0
    assert num_slots <= num_rows, (num_slots, num_rows)
    if num_rows:
        _list_pages[(num_rows,)](
            block_table,
            block_table.stride(0),
            starts,
            pages,
            slots if pad else starts,
            num_slots,
            padded_slots if pad else pages,
            BLOCK=256,
            PAD=pad,
            num_warps=2,
        )
