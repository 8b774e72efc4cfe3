"""Adds the ranks' sums of each row, in the order of the ranks and in float32.

T rows, D their width, r ranks.
"""

import torch
import triton
import triton.language as tl

MAX_BLOCK = 2048


@triton.jit(do_not_specialize=["num_rows", "own"])
def sum_parts_kernel(
    parts_ptr,
    own_ptr,
    out_ptr,
    num_rows,
    own,
    WIDTH: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(NUM):
        part_ptr = parts_ptr + (part * num_rows + row) * WIDTH
        if part == own:
            part_ptr = own_ptr + row * WIDTH
        total += tl.load(part_ptr + columns, mask=columns < WIDTH).to(tl.float32)
    out_at = out_ptr + row * WIDTH + columns
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


def sum_parts(parts_rTD: torch.Tensor, own_TD: torch.Tensor, own: int) -> torch.Tensor:
    """[T, D]: the sum of parts_rTD, of which part `own` is own_TD instead. All contiguous."""
    num_parts, num_rows, width = parts_rTD.shape
    assert parts_rTD.is_contiguous() and own_TD.is_contiguous()
    out_TD = torch.empty_like(own_TD)
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    if num_rows:
        sum_parts_kernel[(num_rows, triton.cdiv(width, block))](
            parts_rTD,
            own_TD,
            out_TD,
            num_rows,
            own,
            WIDTH=width,
            NUM=num_parts,
            BLOCK=block,
            num_warps=4 if block > 512 else 1,
        )
    return out_TD
