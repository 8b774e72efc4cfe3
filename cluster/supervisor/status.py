"""The state of a group: what ingresses act on, and what people and metrics see. Plain data."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cluster.config.phalanx_config import Role
from cluster.supervisor.launcher import RankHandle
from cluster.supervisor.placement import RankLocation
from workers.rank.rank_info import RankInfo

GroupState = Literal["starting", "serving", "rebuilding", "draining", "failed", "stopped"]


class GroupHealth(NamedTuple):
    """The state of a group and its part of requests; `error` explains the states failed and stopped.

    planned   whether a rebuild makes a change that was requested: no rank has failed, and the pause is short
    """

    state: GroupState
    epoch: int
    error: str
    role: Role = "generate"
    planned: bool = False

    @property
    def alive(self) -> bool:
        """Whether the ranks compute: requests in flight go on."""
        return self.state in ("serving", "draining")

    @property
    def ended(self) -> bool:
        """Whether the group will not serve again."""
        return self.state in ("failed", "stopped")

    @property
    def broken(self) -> bool:
        """Whether ranks have failed: another group that can take them goes on with requests in flight."""
        return self.state == "failed" or (self.state == "rebuilding" and not self.planned)


@dataclass(frozen=True)
class GroupMembers:
    """What an ingress needs to reach the ranks of one epoch, in rank order.

    failed: the ranks that ended the epoch before, by an error of their step or as a process that had to be replaced
    """

    epoch: int
    ranks: list[RankHandle]
    infos: list[RankInfo]
    failed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Registration:
    """What an ingress gets with the lease of a group: its id, and the members of the group."""

    lease_id: str
    members: GroupMembers


@dataclass(frozen=True)
class Renewal:
    """The answer to a heartbeat.

    expired   leases of the ingress for which it must register again
    refused   digests of requests that have ended ranks of any ingress of late
    """

    expired: list[str]
    refused: list[bytes]


@dataclass(frozen=True)
class Rebuild:
    """A rebuild that has ended in service.

    stages  name and seconds of each stage of its last attempt, after the seconds until a hung rank was noticed
    """

    reason: str
    seconds: float
    stages: tuple[tuple[str, float], ...]


@dataclass
class GroupStatus:
    """A group and the progress of its start or rebuild, as shown to people.

    name          that of the group's spec
    role          its part of requests, which an operator can change
    planned       whether the rebuild that runs makes a change that was requested
    since         Unix time at which the state began
    stages        name and seconds of each stage that ended
    progress      done and total of the present stage; 0 if unknown
    num_rebuilds  rebuilds that ended in service
    rebuild_s     seconds of them by stage
    vote_ages     seconds since the last vote of each rank; 0 while a rank sleeps because the group is idle
    slow          the slow ranks
    slowdowns     how many times as long as the others each rank takes, as last measured; empty if it was not yet
    """

    name: str = ""
    role: Role = "generate"
    state: GroupState = "starting"
    epoch: int = 0
    error: str = ""
    planned: bool = False
    since: float = field(default_factory=time.time)
    stage: str = "placement"
    stages: list[tuple[str, float]] = field(default_factory=list)
    progress: tuple[int, int] = (0, 0)
    infos: list[RankInfo] = field(default_factory=list)
    locations: list[RankLocation] = field(default_factory=list)
    num_rebuilds: int = 0
    last_rebuild: Rebuild | None = None
    rebuild_s: dict[str, float] = field(default_factory=dict)
    vote_ages: list[float] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)
    slowdowns: list[float] = field(default_factory=list)

    @property
    def health(self) -> GroupHealth:
        """What ingresses act on."""
        return GroupHealth(self.state, self.epoch, self.error, self.role, self.planned)

    def rebuilt(self, rebuild: Rebuild) -> None:
        """Count a rebuild."""
        self.num_rebuilds += 1
        self.last_rebuild = rebuild
        for name, seconds in rebuild.stages:
            self.rebuild_s[name] = self.rebuild_s.get(name, 0.0) + seconds

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `/ready` and `phalanx status`; seconds are rounded to milliseconds."""
        going_up = self.state in ("starting", "rebuilding")
        last = self.last_rebuild
        return {
            "name": self.name,
            "role": self.role,
            "state": self.state,
            "epoch": self.epoch,
            "since": round(self.since, 3),
            "seconds": round(max(0.0, time.time() - self.since), 3),
            "error": self.error,
            "stage": self.stage if going_up else "",
            "progress": list(self.progress) if going_up else [0, 0],
            "stages": _seconds(self.stages),
            "rebuilds": self.num_rebuilds,
            "rebuild_seconds": _seconds(self.rebuild_s.items()),
            "last_rebuild": last
            and {
                "reason": last.reason,
                "seconds": round(last.seconds, 3),
                "stages": _seconds(last.stages),
            },
            "vote_age_seconds": [round(age, 3) for age in self.vote_ages],
            "slow_ranks": self.slow,
            "rank_slowdowns": [round(slowdown, 2) for slowdown in self.slowdowns],
        }


def _seconds(stages: Any) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in stages}


def can_begin(healths: Sequence[GroupHealth]) -> bool:
    """Whether no group starts, and one serves or none will."""
    if any(health.state == "starting" for health in healths):
        return False
    return any(h.alive for h in healths) or all(h.ended for h in healths)


def reasons_of(healths: Sequence[GroupHealth]) -> str:
    """The different errors of groups in one line."""
    return "; ".join(dict.fromkeys(health.error for health in healths if health.error))
