"""Counts of drafts on one rank: verified, and confirmed by depth. Written by the step loop."""

from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import VERIFY
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
        if batch.draft_token_ids is None:
            return
        for part, count in zip(batch.parts, output.counts, strict=True):
            if part.kind is not VERIFY:
                continue
            drafted = len(part.draft_token_ids)
            self.num_drafts += 1
            self.num_tokens += drafted
            self.accepted += [0] * (drafted - len(self.accepted))
            for place in range(count - 1):
                self.accepted[place] += 1
