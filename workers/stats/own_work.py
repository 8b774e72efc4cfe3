"""How long a rank works itself in its steps, without its waits for peers and for its device, and how much work that is.

All ranks begin and end each step together, so they take equally long for it. The own time of a rank differs.
"""

import time
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kernels.host.waits import waited_s

if TYPE_CHECKING:
    from workers.step.scheduled_batch import ScheduledBatch
    from workers.step.step_sync import StepPlan


_num_computed_tokens = attrgetter("num_computed_tokens")


class OwnWork(NamedTuple):
    """Sums over steps of one rank.

    own_s        time of the step loop without waits
    total_s      time of the step loop
    rows         rows of the forwards, with padding
    seqs         sequences in the steps
    keys         tokens that attention reads, of each row
    expert_rows  rows of the rank's experts, in the steps that sample them
    """

    steps: int = 0
    own_s: float = 0.0
    total_s: float = 0.0
    rows: int = 0
    seqs: int = 0
    keys: int = 0
    expert_rows: int = 0

    def __add__(self, other: tuple[float, ...]) -> "OwnWork":  # type: ignore[override]
        return OwnWork(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]

    def __sub__(self, other: "OwnWork") -> "OwnWork":
        return OwnWork(*(a - b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]


class WorkMeter:
    """Adds up the work of one rank. The step loop's thread calls it; any thread reads `total`.

    A step counts from its launch to the next launch or to the moment when the rank has nothing to run.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float] = waited_s,
    ):
        self.total = OwnWork()
        self._clock, self._waited = clock, waited
        self._step: OwnWork | None = None  # that is under way
        self._began = self._waited_before = 0.0

    def launch(self, batch: "ScheduledBatch", plan: "StepPlan") -> None:
        """Note that a step is launched."""
        self.pause()
        computed = np.fromiter(map(_num_computed_tokens, batch.seqs), np.int64, len(batch.seqs))
        keys = int(batch.num_new_tokens @ (computed + batch.num_new_tokens))
        rows = plan.padded_tokens or max(1, batch.num_tokens)
        self._step = OwnWork(1, rows=rows, seqs=len(batch.seqs), keys=keys)

    def pause(self) -> None:
        """Note that the step has ended, or that the rank has nothing to run."""
        now, waited = self._clock(), self._waited()
        if self._step is not None:
            total_s = now - self._began
            own_s = total_s - (waited - self._waited_before)
            self.total += self._step._replace(own_s=own_s, total_s=total_s)
        self._step, self._began, self._waited_before = None, now, waited

    def sampled(self, expert_rows: int) -> None:
        """Note the load of the rank's experts in a step that samples it."""
        self.total += OwnWork(expert_rows=expert_rows)
