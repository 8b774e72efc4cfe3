"""Ends the ranks of earlier servers that have no supervisor any more, and gives back their places."""

import logging
import re
from contextlib import suppress

import ray
from ray.util.placement_group import placement_group_table, remove_placement_group

from cluster.supervisor import placement
from cluster.supervisor.launcher import NAMESPACE

logger = logging.getLogger(__name__)

SUPERVISOR = "supervisor:"
RANK = "rank:"
_OWNED = re.compile(r".+?:(?P<supervisor>[0-9a-f]{32})(:|$)")
"""Begins the name of each placement group of a launcher, and after RANK the name of each of its actors."""


def sweep() -> None:
    """End the ranks of supervisors that have ended for good, and remove their placement groups.

    Such a rank ends itself within a minute, but a stopped rank does not, and the place of a dead rank stays reserved.
    """
    # Before the names: a server that starts now has its name first.
    places = placement_group_table().values()
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
    living = {_actor_id(name) for name in names if name.startswith(SUPERVISOR)}
    for name in names:
        if name.startswith(RANK) and _is_orphan(name.removeprefix(RANK), living):
            logger.warning("ending %s: its supervisor has ended", name)
            with suppress(ValueError):  # it has ended since
                ray.kill(ray.get_actor(name, NAMESPACE))
    for entry in places:
        if entry["state"] != "REMOVED" and _is_orphan(entry["name"], living):
            group = placement.find(entry["name"])
            if group is not None:  # of this namespace
                logger.warning("removing place %s: its supervisor has ended", entry["name"])
                remove_placement_group(group)


def _is_orphan(name: str, living: set[str]) -> bool:
    owned = _OWNED.match(name)
    return owned is not None and owned["supervisor"] not in living


def _actor_id(name: str) -> str:
    try:
        return str(ray.get_actor(name, NAMESPACE)._actor_id.hex())
    except ValueError:  # it has ended since
        return ""
