"""Finds the ranks of a group again, after Ray has restarted the supervisor's process."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.supervisor.launcher import RankHandle
from kernels.routing.expert_map import STANDBY
from workers.config import RankConfig
from workers.rank.rank_info import Membership, RankInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovery:
    """The living ranks of a group.

    config   that of the newest rank: the number of ranks may have been changed in service
    seats    the newest actor of each rank
    epoch    no rank is in a later epoch, or fenced from one
    infos    the reports of all ranks, in rank order, if all of them serve in one epoch
    streams  the open streams of ingresses, if all ranks serve
    reason   why the group must be rebuilt; "" if all ranks serve
    """

    config: RankConfig
    seats: dict[int, RankHandle]
    epoch: int = 0
    infos: list[RankInfo] = field(default_factory=list)
    streams: frozenset[str] = frozenset()
    reason: str = ""


async def find_memberships(
    actors: Sequence[RankHandle], timeout_s: float
) -> list[tuple[RankHandle, Membership]]:
    """The actors that answer within `timeout_s`, each with its membership."""

    async def ask(actor: RankHandle) -> Any:
        async with asyncio.timeout(timeout_s):
            return await actor.membership.remote()

    answers = await asyncio.gather(*map(ask, actors), return_exceptions=True)
    found = []
    for actor, answer in zip(actors, answers, strict=True):
        if isinstance(answer, BaseException):
            logger.warning("a rank is not recovered: %s: %s", type(answer).__name__, answer)
        else:
            found.append((actor, answer))
    return found


def recover(found: Sequence[tuple[RankHandle, Membership]], start: RankConfig) -> Recovery:
    """The state of a group that was started with the configuration `start`, from the memberships of its actors."""
    ordered = sorted(found, key=lambda pair: max(pair[1].epoch, pair[1].fence))
    newest = {member.rank: (actor, member) for actor, member in ordered if member.rank != STANDBY}
    configs = [member.config for _, member in ordered if member.rank != STANDBY and member.config]
    config = configs[-1] if configs else start
    num_ranks = config.num_ranks
    seats = {rank: actor for rank, (actor, _) in newest.items() if rank in range(num_ranks)}
    epoch = max((max(member.epoch, member.fence) for _, member in found), default=0)
    serving = {
        rank: member.info
        for rank, (_, member) in newest.items()
        if member.info is not None and member.epoch == epoch
    }
    missing = [rank for rank in range(num_ranks) if rank not in serving]
    if missing:
        names = ", ".join(map(str, missing))
        reason = f"the supervisor was restarted, and rank {names} did not serve"
        return Recovery(config, seats, epoch, reason=reason)
    infos = [serving[rank] for rank in range(num_ranks)]
    streams = frozenset(name for _, member in newest.values() for name in member.streams)
    return Recovery(config, seats, epoch, infos, streams)
