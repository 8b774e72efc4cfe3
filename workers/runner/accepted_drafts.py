"""Which drafts of a step count, computed on the device, for linear attention: its states follow without the host.

The host finds the same numbers when it reads the draws (`workers.step.step_output.count_verified`). Here nothing waits.

B sequences, L rows with logits.
"""

import numpy as np
import torch

from kernels.host.host_copy import to_device
from kernels.linear_attention.base import LinearAttention
from workers.step.forward_batch import ForwardBatch
from workers.step.scheduled_batch import ScheduledBatch


def accept_drafts(
    linear_attention: LinearAttention,
    scheduled: ScheduledBatch,
    batch: ForwardBatch,
    token_L: torch.Tensor,
    counts_B: np.ndarray | None,
) -> None:
    """Enter the drafts of a forward that count in the slots of its sequences.

    token_L    int64, the draws on the device
    counts_B   how many draws of each sequence count; None: those that equal its drafts, and one more
    """
    slots_B = batch.state_slots
    assert slots_B is not None, "the model has linear attention"
    accepted_B = None
    if scheduled.draft_token_ids is not None:
        if counts_B is None:
            accepted_B = count_accepted(scheduled, token_L)
        else:
            accepted_B = to_device(np.maximum(counts_B - 1, 0), slots_B.device)
    linear_attention.accept(slots_B, accepted_B)


def count_accepted(scheduled: ScheduledBatch, token_L: torch.Tensor) -> torch.Tensor:
    """Return int64 [B]: the drafts of each sequence before the first that differs from its draw."""
    assert scheduled.draft_token_ids is not None, "the step has no drafts"
    arrays = scheduled.draft_token_ids, scheduled.logits_places, scheduled.logits_seqs
    draft_L, place_L, seq_L = to_device(np.stack(arrays), token_L.device)
    # No draw equals the entry behind the last draft, so the first that differs exists. Sequences without logits have 0.
    place_L = torch.where(token_L == draft_L, len(token_L), place_L)
    accepted_B = token_L.new_zeros(len(scheduled.seqs))
    return accepted_B.scatter_reduce_(0, seq_L, place_L, "amin", include_self=False)
