"""Balances the experts of one group over its ranks while they serve, and keeps their map for the next epoch.

The ranks stage and commit moves by their votes, so a supervisor that ends in the middle leaves whole maps.
"""

import asyncio
import logging
import math
from collections.abc import Sequence

from cluster.supervisor.failures import failure_message
from cluster.supervisor.launcher import RankHandle
from cluster.supervisor.ray_calls import gather
from kernels.host.owned import OwnedTask
from workers.config import RankConfig
from workers.specs.expert_layout import ExpertLayout, ExpertMove, ExpertReport, joined

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the load."""
MIN_GAIN = 0.03
"""Share of the busiest ranks' load that `auto` wants to gain by a move, if the load is more certain than that."""
MIN_ROWS = 4
"""Rows of an expert in the mean, from which the load of a layer is planned by."""
PLAN_AGAIN = 30
"""Looks between two plans of a load that no plan has made more even; plans of many ranks take seconds."""


class ExpertBalance:
    """The experts of one group, over all its epochs.

    layout   for the next epoch, of any number of ranks; None: as the configuration of the ranks has it
    """

    def __init__(self, look_s: float = LOOK_S) -> None:
        self.layout: ExpertLayout | None = None
        self._look_s = look_s
        self._looks = _Looks(None)
        self._task: OwnedTask | None = None

    def begin(self, ranks: Sequence[RankHandle], epoch: int, config: RankConfig) -> None:
        """Balance the experts of an epoch that serves, until `end` or the end of a rank."""
        self.end()
        self._looks = _Looks(self.layout)
        if config.experts.rebalance != "off" and not config.dims.alone:
            work = self._balance(self._looks, ranks, epoch, config)
            self._task = OwnedTask(work, _stopped, "balance-experts", may_end=True)

    def end(self) -> None:
        """Begin no further move."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _balance(
        self, looks: "_Looks", ranks: Sequence[RankHandle], epoch: int, config: RankConfig
    ) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            reports = await gather([rank.expert_report.remote(epoch) for rank in ranks])
            move = await asyncio.to_thread(looks.next_move, reports, config.experts.rebalance)
            self.layout = looks.layout
            if move is not None:
                logger.info("moving experts of %d layers (move %d)", len(move.layers), move.number)
                await gather([rank.move_experts.remote(epoch, move) for rank in ranks])


class _Looks:
    """The looks at the load of one epoch; a thread that still plans when the epoch has ended changes nothing else.

    layout   for the next epoch, as in ExpertBalance
    seen     step of the last load that was looked at
    """

    def __init__(self, layout: ExpertLayout | None) -> None:
        self.layout, self.seen = layout, -1
        self._planned_at = 0  # step of the last move
        # Busiest rank over the mean in a plan that gained too little.
        self._in_vain: float | None = None
        self._since = 0  # looks since that plan

    def next_move(self, reports: Sequence[ExpertReport], every: str | int) -> ExpertMove | None:
        """Return a move to begin; None while one runs, where the load is not known, or where too little is gained."""
        if any(report.move for report in reports) or reports[0].step == self.seen:
            return None
        present = joined(reports)
        if present is None:
            return None
        self.seen = reports[0].step
        self.layout = present if self.layout is None else self._with_known_loads(present)
        if isinstance(every, int) and self.seen - self._planned_at < every:
            return None
        present = _without_chance(present)
        before, even = present.busiest()
        if not even or self._is_vain(before / even):
            return None
        planned = present.planned()
        after, _ = planned.busiest()
        number = 1 + max(max(report.move, report.ended) for report in reports)
        move = ExpertMove.between(number, present, planned)
        if move is None or (every == "auto" and 1 - after / before < _worthwhile(present)):
            self._in_vain, self._since = before / even, 0
            return None
        self._planned_at, self._in_vain, self.layout = self.seen, None, planned
        return move

    def _is_vain(self, imbalance: float) -> bool:
        """Return whether a plan of this load, busiest rank over the mean, would gain as little as the last one."""
        self._since += 1
        if self._in_vain is None or self._since >= PLAN_AGAIN:
            return False
        return imbalance < (1 + MIN_GAIN) * self._in_vain

    def _with_known_loads(self, present: ExpertLayout) -> ExpertLayout:
        """Return the present map; a layer that has moved just now keeps the loads that it was planned by."""
        assert self.layout is not None
        known = {
            layer: it.loads
            if any(it.loads) or layer not in self.layout.layers
            else self.layout.layers[layer].loads
            for layer, it in present.layers.items()
        }
        if any(len(loads) != present.num_experts for loads in known.values()):
            return present
        return present.with_loads(known)


def _worthwhile(layout: ExpertLayout) -> float:
    """Return the share of the busiest ranks' load that a move must gain: more than differs by chance."""
    _, even = layout.busiest()
    layers = sum(any(it.loads) for it in layout.layers.values())
    return max(MIN_GAIN, 2 / math.sqrt(even / layers))


def _without_chance(layout: ExpertLayout) -> ExpertLayout:
    """Return the layout without the loads of layers that had few rows: they stay."""
    fewest = MIN_ROWS * layout.num_experts
    nothing = [0.0] * layout.num_experts
    loads = {
        layer: it.loads if sum(it.loads) >= fewest else nothing
        for layer, it in layout.layers.items()
    }
    return layout.with_loads(loads)


def _stopped(error: BaseException) -> None:
    """A rank that has ended ends the epoch too; the next one begins anew."""
    logger.info("the experts are not balanced any more in this epoch: %s", failure_message(error))
