"""Counts of drafts on one rank: verified, and confirmed by depth. Written by the step loop."""

import numpy as np

from workers.step.scheduled_batch import ScheduledBatch
from workers.step.step_output import StepOutput


class DraftCounts:
    """Counts since the start.

    num_drafts     times that a sequence had drafts in a step
    num_tokens     drafts
    accepted       drafts that the model confirmed, by their place behind the sequence's last token
    """

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_tokens = 0
        self.accepted: list[int] = []

    def count(self, batch: ScheduledBatch, output: StepOutput) -> None:
        """Count the drafts of one step."""
        if not batch.num_verify:
            return
        first = batch.num_single_rows
        verify = slice(first, first + batch.num_verify)
        drafted = batch.num_logits[verify] - 1
        accepted = np.array(output.counts[verify]) - 1
        self.num_drafts += batch.num_verify
        self.num_tokens += int(drafted.sum())
        # How many sequences have 0 accepted drafts, 1, and so on; then how many have at least 1, 2, and so on.
        ends = np.bincount(accepted, minlength=int(drafted.max()) + 1)
        reached = ends[::-1].cumsum()[-2::-1].tolist()
        self.accepted += [0] * (len(reached) - len(self.accepted))
        for place, count in enumerate(reached):
            self.accepted[place] += count
