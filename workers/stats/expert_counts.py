"""The load of one rank's experts, from readings of the counts of their rows, at steps that all ranks have in common.

L layers of the model, s slots of the rank. Knows nothing of devices: the readings are numpy arrays.
"""

from typing import Any, NamedTuple

import numpy as np

from workers.step.step_sync import LOAD_STEPS

KEPT = 0.9
"""Share of the load that stays in the recent load at the next reading: half of it is 110 steps old or younger."""


class LayerRows(NamedTuple):
    """Rows that came to a rank's experts in each layer.

    step      the last step that counts
    rows_L    one number a layer, 0 in layers without experts
    """

    step: int
    rows_L: list[int]


class ExpertCounts:
    """Read by any thread, written by the step loop.

    recent_Ls   float64, the load of each slot, that of older steps with less weight
    step        the last step that counts there; -1 before the first
    """

    def __init__(self) -> None:
        self.recent_Ls: np.ndarray | None = None
        self.step = -1
        self._moved: set[int] = set()  # layers, since the last window began
        self._counts_Ls: np.ndarray | None = None  # of the last reading
        self._window_start_Ls: np.ndarray | None = None
        self._step = -1  # of the last reading
        self._window: LayerRows | None = None
        self._of_step: LayerRows | None = None
        self._balancedness: float | None = None
        self._num_balanced, self._sum_balanced = 0, 0.0

    def moved(self, layer: int) -> None:
        """Forget the recent load of a layer: its slots have other experts from the next step on."""
        if self.recent_Ls is not None:
            self.recent_Ls[layer] = 0
        self._moved.add(layer)

    def read(self, step: int, counts_Ls: np.ndarray) -> int:
        """Take the counts behind `step`; return the rows of this step if the step before was read too, or 0.

        counts_Ls   int64, rows since the engine began
        """
        before_Ls, before = self._counts_Ls, self._step
        self._counts_Ls, self._step = counts_Ls, step
        if step % LOAD_STEPS == 0:
            self._end_window(step, counts_Ls)
            self.step = step
        if before_Ls is None or before != step - 1:
            return 0
        rows_Ls = counts_Ls - before_Ls
        self._of_step = LayerRows(step, rows_Ls.sum(axis=1).tolist())
        even = balancedness(rows_Ls)
        if even is not None:
            self._balancedness = even
            self._num_balanced += 1
            self._sum_balanced += even
        return int(rows_Ls.sum())

    def _end_window(self, step: int, counts_Ls: np.ndarray) -> None:
        start_Ls = self._window_start_Ls
        rows_Ls = counts_Ls if start_Ls is None else counts_Ls - start_Ls
        self._window_start_Ls = counts_Ls
        self._window = LayerRows(step, rows_Ls.sum(axis=1).tolist())
        kept_Ls = 0.0 if self.recent_Ls is None else KEPT * self.recent_Ls
        recent_Ls = kept_Ls + rows_Ls
        recent_Ls[sorted(self._moved)] = 0
        self._moved.clear()
        self.recent_Ls = recent_Ls

    def snapshot(self) -> dict[str, Any]:
        """Return the statistics, picklable.

        expert_rows           rows of all steps up to the last reading
        expert_window         LayerRows since the reading before, of about LOAD_STEPS steps; None before the first
        expert_step           LayerRows of one step; None before the first
        expert_balancedness   mean rows of a slot over those of the busiest slot, in that step; None: it had no rows
        expert_balancedness_samples   number and sum of these
        """
        counts_Ls = self._counts_Ls
        return {
            "expert_rows": 0 if counts_Ls is None else int(counts_Ls.sum()),
            "expert_window": self._window,
            "expert_step": self._of_step,
            "expert_balancedness": self._balancedness,
            "expert_balancedness_samples": (self._num_balanced, self._sum_balanced),
        }


def balancedness(rows_Ls: np.ndarray) -> float | None:
    """Return the mean rows of a slot over the rows of the busiest slot, over layers with rows; None without rows.

    rows_Ls   int64; 1 = even
    """
    rows_Ls = rows_Ls[rows_Ls.any(axis=1)]
    if not len(rows_Ls):
        return None
    return float((rows_Ls.mean(axis=1) / rows_Ls.max(axis=1)).mean())
