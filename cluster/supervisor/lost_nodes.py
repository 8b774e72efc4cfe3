"""Which nodes of a group cannot be reached or are drained, and the wait for nodes.

Knows nothing of processes: their ranks are names in messages.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping

from cluster.supervisor.launcher import CAPACITY_WAIT_S, Launcher
from cluster.supervisor.placement import NodeLostError

logger = logging.getLogger(__name__)

POLL_S = 0.2


async def silent(launcher: Launcher, bundles: Collection[int]) -> set[int]:
    """Return those of `bundles` without a node that can be reached."""
    found = await asyncio.gather(*map(launcher.answers, bundles))
    return {bundle for bundle, answers in zip(bundles, found, strict=True) if not answers}


async def leave_draining(launcher: Launcher, bundles: Collection[int]) -> dict[int, float]:
    """Move those of `bundles` that are on nodes that Ray drains to other nodes.

    Returns the bundles for which no other node has room, with the seconds until the end of their nodes.
    """
    found = await launcher.draining()
    return {
        bundle: left_s
        for bundle, left_s in found.items()
        if bundle in bundles and not await launcher.move(bundle)
    }


async def wait_for_capacity(launcher: Launcher, num_nodes: int) -> None:
    """Give Ray time to find nodes for the bundles of lost nodes."""
    deadline = time.monotonic() + CAPACITY_WAIT_S
    while time.monotonic() < deadline:
        if all(map(launcher.has_capacity, range(num_nodes))):
            return
        await asyncio.sleep(POLL_S)


async def wait_for_nodes(
    launcher: Launcher, ranks: Mapping[int, Collection[int]], limit_s: float
) -> float:
    """Wait until the nodes of all bundles can be reached, or Ray has found other nodes for them; return the seconds.

    Raises NodeLostError after `limit_s` seconds.

    ranks   by bundle
    """
    began, warned = time.monotonic(), False
    while lost := await silent(launcher, ranks):
        numbers = sorted(rank for bundle in lost for rank in ranks[bundle])
        names = f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        if time.monotonic() > began + limit_s:
            raise NodeLostError(
                f"the node of {names} did not answer for {limit_s:g} s (cluster.start_timeout_s), and no other node "
                "has room; start it again, or allow fewer ranks (cluster.shrink)"
            )
        if not warned:
            logger.warning("the node of %s does not answer; waiting %g s for it", names, limit_s)
            warned = True
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began
