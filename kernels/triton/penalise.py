"""Triton kernel for presence, frequency and repetition penalties on whole rows of logits, in place.

P penalised rows of B, S slots, V vocabulary.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit(do_not_specialize=["vocab_size", "value_stride", "penalised_stride"])
def _penalise(
    logits_ptr,
    logits_row,
    rows_ptr,
    seen_ptr,
    seen_row,
    slots_ptr,
    values_ptr,
    value_stride,
    penalised_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    which = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab_size
    row = tl.load(rows_ptr + which)
    slot = tl.load(slots_ptr + which)
    values_ptr += which * penalised_stride
    presence = tl.load(values_ptr)
    frequency = tl.load(values_ptr + value_stride)
    repetition = tl.load(values_ptr + 2 * value_stride)
    logits_ptr += row * logits_row + token
    seen = tl.load(seen_ptr + slot * seen_row + token, mask=mask, other=0)
    logit = tl.load(logits_ptr, mask=mask, other=0.0)
    repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(seen > 0, repeated, logit)
    count = (seen >> 1).to(tl.float32)
    logit -= frequency * count
    logit -= tl.where(count > 0, presence, 0.0)
    tl.store(logits_ptr, logit, mask=mask)


def penalise(
    logits_BV: torch.Tensor,
    rows_P1: torch.Tensor,
    seen_SV: torch.Tensor,
    slots_P1: torch.Tensor,
    values_3P1: torch.Tensor,
) -> None:
    """Apply the penalties to the rows `rows_P1` of the logits, in place.

    logits_BV     float32
    rows, slots   int64, index of each penalised row in the logits and in `seen`
    seen_SV       int32, twice a token's count in the output, plus 1 if the prompt has the token
    values        float32: presence, frequency, repetition
    """
    vocab_size = logits_BV.shape[1]
    assert logits_BV.stride(1) == seen_SV.stride(1) == 1
    _penalise[(len(rows_P1), triton.cdiv(vocab_size, BLOCK))](
        logits_BV,
        logits_BV.stride(0),
        rows_P1,
        seen_SV,
        seen_SV.stride(0),
        slots_P1,
        values_3P1,
        values_3P1.stride(0),
        values_3P1.stride(1),
        vocab_size,
        BLOCK=BLOCK,
        num_warps=8,
    )
