"""A step between its launch and its commit."""

from dataclasses import dataclass

from kernels.pending import Pending
from workers.stats.stats import HostTimes
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.step_output import StepOutput
from workers.step.step_sync import StepPlan


@dataclass(frozen=True)
class InFlightStep:
    """A step that is launched and not committed. prefill_cap: cap of its prompt tokens, 0 = no rank decodes in it."""

    batch: ScheduledBatch
    plan: StepPlan
    output: Pending[StepOutput]
    times: HostTimes
    prefill_cap: int
