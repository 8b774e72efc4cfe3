"""The map and the load of a group's experts, of one moment, from reports of its ranks."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from cluster.errors import EngineDeadError
from workers.specs.expert_layout import ExpertLayout, ExpertReport, joined

TRIES, TRY_AGAIN_S = 40, 0.05


async def settled(reports: Callable[[], Awaitable[Sequence[ExpertReport]]]) -> ExpertLayout:
    """Return the layout with the loads of all ranks, as soon as their reports agree. Raises EngineDeadError."""
    for _ in range(TRIES):
        found = await reports()
        layout = joined(found) if found else None
        if layout is not None:
            return layout
        await asyncio.sleep(TRY_AGAIN_S)
    raise EngineDeadError("the ranks move experts; try again later")
