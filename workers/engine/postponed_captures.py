"""When an idle group captures the CUDA graphs that a rebuild has postponed.

Requests come at once behind a rebuild, and those that wait for images or KV begin any moment: a capture would delay all
of them. So a group captures once no rank has requests, and none came for CALM_S.
"""

from collections.abc import Callable

from workers.runner.cuda_graphs import StepGraphs
from workers.step.step_sync import StepPlan

CALM_S = 0.5


class PostponedCaptures:
    """One turn for each plan of a group that has nothing to run; all ranks take it alike.

    sleep   waits for a reason to vote again, for so many seconds at most
    """

    def __init__(self, sleep: Callable[[float], None]):
        self._sleep = sleep
        self._calm_step: int | None = None  # votes when the group was calm last

    def turn(self, plan: StepPlan, step: int, graphs: StepGraphs | None) -> bool:
        """Capture a graph, or wait because the group may not stay calm; return False if there is nothing to capture.

        step   votes so far
        """
        if graphs is None or not graphs.num_postponed or not plan.calm:
            return False
        if self._calm_step == step - 1:
            graphs.capture_next()
        else:
            self._sleep(CALM_S)
        self._calm_step = step
        return True
