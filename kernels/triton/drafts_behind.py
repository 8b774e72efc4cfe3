"""Triton kernels for drafts of the last step: how many count, and where the next forward goes on behind them.

The host launches one kernel in place of ten to twenty operators of torch, because a step of few sequences waits for it.

B sequences, T rows, L rows with logits, R rows of the InputBatch, K most drafts of a sequence.
"""

import torch
import triton
import triton.language as tl

MOST_ROWS = 32
"""Rows of a sequence with drafts in one form of a kernel; with more it is compiled anew for each power of two."""

NOT_GIVEN = -1
"""In place of a given number of draws."""


@triton.jit(do_not_specialize=["num_seqs", "drafts_ptr", "tokens_ptr"])
def _enter_draws(
    seqs_ptr,
    num_seqs,
    drafts_ptr,
    tokens_ptr,
    rows_ptr,
    accepted_ptr,
    last_ptr,
    rejected_ptr,
    KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    first = tl.load(seqs_ptr + seq)
    count = tl.load(seqs_ptr + num_seqs + seq)
    given = tl.load(seqs_ptr + 2 * num_seqs + seq)
    place = tl.arange(0, BLOCK)
    compared = (place < count) & (given < 0)
    token = tl.load(tokens_ptr + first + place, mask=compared, other=0)
    draft = tl.load(drafts_ptr + first + place, mask=compared, other=0)
    if KEEPS:
        late = compared & (draft < 0)
        draft = tl.where(late, tl.load(last_ptr + (-1 - draft), mask=late, other=0), draft)
    wrong = tl.min(tl.where(compared & (token != draft), place, BLOCK), 0).to(tl.int64)
    accepted = tl.where(given < 0, wrong, tl.maximum(given - 1, 0))
    accepted = tl.where(count > 0, accepted, 0)
    tl.store(accepted_ptr + seq, accepted)
    if KEEPS:
        drawn = count > 0
        last = tl.load(tokens_ptr + first + accepted, mask=drawn, other=0)
        row = tl.load(rows_ptr + first + accepted, mask=drawn, other=0)
        tl.store(last_ptr + row, tl.maximum(last, 0), mask=drawn)
        tl.store(rejected_ptr + row, count - 1 - accepted, mask=drawn)


def enter_draws(
    seqs_3B: torch.Tensor,
    draft_L: torch.Tensor,
    token_L: torch.Tensor,
    sampling_rows_L: torch.Tensor,
    last_tokens: torch.Tensor | None,
    rejected_R: torch.Tensor,
    most: int,
) -> torch.Tensor:
    """Return how many drafts of each sequence count, int64 [B]: those before the first that differs from its draw.

    All are int64. The draw behind the last draft that counts becomes the last token of its row.

    seqs_3B      first row with logits; number of rows with logits, 0 = none; draws that count, or NOT_GIVEN
    draft_L      drafts, or references -1 - index in `last_tokens`; no draw equals the entry behind the last draft of a
                 sequence. Not read where the number of draws is given
    token_L      draws; negative where no token could be drawn
    last_tokens  last tokens of R rows, and more, written; None: not kept
    rejected_R   drafts of each row that do not count, written with `last_tokens`
    most         rows with logits of a sequence with drafts, at most
    """
    num_seqs = seqs_3B.shape[1]
    assert seqs_3B.is_contiguous() and token_L.is_contiguous() and sampling_rows_L.is_contiguous()
    accepted_B = torch.empty(num_seqs, dtype=torch.int64, device=token_L.device)
    if num_seqs:
        _enter_draws[(num_seqs,)](
            seqs_3B,
            num_seqs,
            draft_L,
            token_L,
            sampling_rows_L,
            accepted_B,
            token_L if last_tokens is None else last_tokens,
            rejected_R,
            KEEPS=last_tokens is not None,
            BLOCK=max(MOST_ROWS, triton.next_power_of_2(most)),
            num_warps=1,
        )
    return accepted_B


@triton.jit(do_not_specialize=["num_seqs", "num_ropes", "table_row", "block_size"])
def _step_back(
    seqs_ptr,
    num_seqs,
    rejected_ptr,
    positions_ptr,
    ropes_ptr,
    num_ropes,
    table_ptr,
    table_row,
    block_size,
    slots_ptr,
    back_ptr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    row = tl.load(seqs_ptr + seq)
    first = tl.load(seqs_ptr + num_seqs + seq)
    count = tl.load(seqs_ptr + 2 * num_seqs + seq)
    back = tl.load(rejected_ptr + row, mask=row >= 0, other=0)
    tl.store(back_ptr + seq, back)
    if back > 0:
        for begin in range(0, count, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            mask = place < count
            place += first
            position = tl.load(positions_ptr + place, mask=mask, other=0) - back
            tl.store(positions_ptr + place, position, mask=mask)
            for column in range(num_ropes):
                rope_ptr = ropes_ptr + place * num_ropes + column
                tl.store(rope_ptr, tl.load(rope_ptr, mask=mask, other=0) - back, mask=mask)
            block = tl.load(
                table_ptr + seq * table_row + position // block_size, mask=mask, other=0
            )
            tl.store(slots_ptr + place, block * block_size + position % block_size, mask=mask)


def step_back(
    seqs_3B: torch.Tensor,
    rejected_R: torch.Tensor,
    positions_T: torch.Tensor,
    rope_positions: torch.Tensor | None,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Move the tokens of sequences back by their rejected drafts, in place; return by how many, int64 [B].

    All are int64.

    seqs_3B         row in the InputBatch, or -1: the sequence stays; its first row of the forward; how many it has
    rope_positions  [T, 3], or None
    block_table     [B, blocks]
    """
    num_seqs = seqs_3B.shape[1]
    assert seqs_3B.is_contiguous() and block_table.stride(1) == 1
    assert rope_positions is None or rope_positions.is_contiguous()
    back_B = torch.empty(num_seqs, dtype=torch.int64, device=positions_T.device)
    _step_back[(num_seqs,)](
        seqs_3B,
        num_seqs,
        rejected_R,
        positions_T,
        positions_T if rope_positions is None else rope_positions,
        0 if rope_positions is None else rope_positions.shape[1],
        block_table,
        block_table.stride(0),
        block_size,
        slot_mapping,
        back_B,
        BLOCK=MOST_ROWS,
        num_warps=1,
    )
    return back_B
