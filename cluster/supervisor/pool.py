"""The model pool: the groups of one server, each run by a task of its own, so that they fail, rebuild and drain apart.

Knows nothing of ingresses beyond their leases.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from cluster.config.phalanx_config import Role
from cluster.supervisor.group import Group
from cluster.supervisor.status import GroupHealth, GroupMembers, GroupStatus
from kernels.host.owned import OwnedTask

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.1


class ModelPool:
    """All methods run in the event loop of the supervisor.

    leases_of   leases_of(index): the leases of ingresses that have streams in a group
    """

    def __init__(self, groups: Sequence[Group], leases_of: Callable[[int], Collection[str]]):
        self.groups = list(groups)
        self._leases_of = leases_of
        self._tasks: list[OwnedTask] = []

    def run(self) -> None:
        """Bring the groups up and keep them serving. The error of a group's task fails this group."""
        for group in self.groups:
            self._own(group, group.run(), "run")

    def named(self, name: str | None) -> list[Group]:
        """The group of this name; all groups without a name. Raises ValueError if there is no such group."""
        found = [group for group in self.groups if name in (None, group.spec.name)]
        if not found:
            raise ValueError(f"there is no group {name!r}; the groups are {self._names()}")
        return found

    def only(self, name: str | None) -> Group:
        """The group of this name, which may be left out if there is one group. Raises ValueError otherwise."""
        if name is None and len(self.groups) > 1:
            raise ValueError(f"name one of the groups {self._names()}")
        (found,) = self.named(name)
        return found

    @property
    def going_up(self) -> bool:
        """Whether a group starts or rebuilds."""
        return any(group.health.state in ("starting", "rebuilding") for group in self.groups)

    @property
    def healths(self) -> list[GroupHealth]:
        """The health of every group."""
        return [group.health for group in self.groups]

    async def changed(self, seen: Sequence[GroupHealth]) -> None:
        """Return as soon as the health of a group differs from `seen`."""
        waits = [
            asyncio.ensure_future(group.changed(health))
            for group, health in zip(self.groups, seen, strict=True)
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def statuses(self) -> list[GroupStatus]:
        """Every group with its progress, for people."""
        return [await group.refreshed_status() for group in self.groups]

    def members(self, index: int) -> GroupMembers | None:
        """The ranks of a group; None while it does not serve."""
        group = self.groups[index]
        return group.members if group.health.alive else None

    def drain(self, group: Group, timeout_s: float) -> None:
        """End one group when its requests have ended, or after `timeout_s` seconds; other groups take new requests.

        Raises ValueError if no other group answers requests.
        """
        if not self.can_spare(group):
            raise ValueError(f"no other group answers than {group.spec.name!r}; drain the server")
        self.begin_drain(group, timeout_s)

    def begin_drain(self, group: Group, timeout_s: float) -> None:
        """Let a group end as `drain` does, whether another group serves now or not."""
        group.drain()
        self._own(group, self._stop_drained(group, timeout_s), "drain")

    def can_spare(self, group: Group) -> bool:
        """Whether another group answers requests: groups of the role prefill do not."""
        others = (other for other in self.groups if other is not group)
        return any(it.health.state == "serving" and it.health.role != "prefill" for it in others)

    def switch_role(self, group: Group, role: Role) -> None:
        """Let a group have another part of new requests.

        Raises ValueError if the group has ended, or if no other group would answer requests.
        """
        name, health = group.spec.name, group.health
        if health.ended:
            raise ValueError(f"group {name!r} is {health.state}; it takes no requests any more")
        if role == "prefill" and not self.can_spare(group):
            raise ValueError(
                f"no other group answers than {name!r}; a group with the role decode or generate has to serve before "
                "this one gets the role prefill"
            )
        logger.info("group %s has the role %s instead of %s", name, role, health.role)
        group.take_role(role)

    def close_stream(self, index: int, lease_id: str) -> None:
        """Let the ranks of a group forget an ingress that is gone."""
        if self.groups[index].health.alive:
            self.groups[index].close_stream(lease_id)

    def fail(self, reason: str) -> None:
        """Fail all groups."""
        for group in self.groups:
            group.fail(reason)

    async def stop(self) -> None:
        """Stop all groups and give back their resources."""
        await asyncio.gather(*(group.stop() for group in self.groups))

    async def close(self) -> None:
        """End the tasks; the ranks go on."""
        for task in self._tasks:
            await task.close()

    async def _stop_drained(self, group: Group, timeout_s: float) -> None:
        index, deadline = self.groups.index(group), time.monotonic() + timeout_s
        while self._leases_of(index) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        logger.info("group %s has drained", group.spec.name)
        await group.stop()

    def _own(self, group: Group, work: Coroutine[Any, Any, None], what: str) -> None:
        name = f"{what} {group.spec.name}"
        self._tasks.append(OwnedTask(work, group.fail_task, name, may_end=True))

    def _names(self) -> str:
        return ", ".join(repr(group.spec.name) for group in self.groups)
