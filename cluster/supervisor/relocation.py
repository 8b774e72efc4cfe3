"""Changes that a serving group begins by itself: back to the wanted ranks, and away from nodes that Ray drains."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.supervisor.failures import failure_message
from cluster.supervisor.roster import Roster

logger = logging.getLogger(__name__)

GROW_S = 10.0
"""Seconds between two looks for room, while the group has fewer ranks than configured."""

Change = Callable[..., Awaitable[None]]
"""`Group.change`"""


async def grow(roster: Roster, serves: Callable[[], bool], change: Change) -> None:
    """Go back to the wanted number of ranks as soon as there is room."""
    while roster.shrunk:
        await asyncio.sleep(GROW_S)
        try:
            if serves() and await roster.has_room_to_grow():
                wanted = roster.wanted
                await change(wanted, f"growing back to {wanted.num_ranks} ranks")
        except Exception as error:  # Ray's GCS, and a process that starts, fail in many ways
            logger.info("the group stays small: %s", failure_message(error))


async def leave_draining_nodes(roster: Roster, change: Change) -> float | None:
    """Move the ranks away from nodes that Ray drains, in a new epoch.

    Returns the seconds until the end of such a node if its ranks have no other place and the group cannot go on
    without them, otherwise None.
    """
    stuck, moved = await roster.leave_draining()
    if stuck and not roster.can_leave_out(stuck):
        return min(stuck.values())
    if stuck or moved:
        try:
            await change(roster.wanted, "leaving a node that Ray drains", avoided=stuck)
        except Exception as error:  # a process that does not start fails in many ways
            logger.warning("the ranks stay on a node that Ray drains: %s", failure_message(error))
    return None
