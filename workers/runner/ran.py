"""What the forward of a step and the passes of a draft model behind it leave on the device."""

from typing import NamedTuple

import torch

from kernels.host.host_copy import StepClock
from workers.runner.draft_rows import DraftRows
from workers.runner.draft_store import StepDrafts
from workers.step.step_output import RunTimes

# hidden_TD; float32 logits_LV, if any row gives logits; hidden_TD after the layers that a draft model reads; the counts
# of the experts' rows, in steps that read them.
HiddenAfter = dict[int, torch.Tensor]
Ran = tuple[torch.Tensor, torch.Tensor | None, HiddenAfter]
Forwarded = tuple[torch.Tensor, torch.Tensor | None, HiddenAfter, torch.Tensor | None]


class StepDraft(NamedTuple):
    """What passes behind a step have drafted, and the times of those behind the step before, None without any."""

    rows: DraftRows
    drafts: StepDrafts
    before: StepClock | None


def run_times(prepare: float, clock: StepClock, passes: StepClock | None) -> RunTimes:
    """Return the times of a step, and of the passes behind the step before; the device has ended both."""
    forward, sample = clock.seconds()
    return RunTimes(prepare, forward, sample, 0.0 if passes is None else passes.seconds()[0])
