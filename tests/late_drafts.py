"""Drafts that only the device has, for tests that compare them."""

import numpy as np
import torch

from workers.step.forward_batch import resolve_pending
from workers.step.scheduled_batch import NO_DRAFT, ScheduledBatch


def with_tokens(scheduled: ScheduledBatch, last_tokens: torch.Tensor | None) -> ScheduledBatch:
    """Return the batch with the tokens of its drafts, which are found on the device before the next drafts are kept."""
    ids_L = scheduled.draft_token_ids
    if ids_L is None or last_tokens is None:
        return scheduled
    compared_L = torch.from_numpy(scheduled.compared_drafts)
    found_L = resolve_pending(compared_L, last_tokens.cpu()).numpy()
    return scheduled.with_drafts(np.where(ids_L == NO_DRAFT, NO_DRAFT, found_L))
