"""Watches the ranks of an epoch that serves: its end by a rank that failed, died or hangs, or by a change."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.supervisor.change import PendingChange
from cluster.supervisor.failures import failure_message, first_failure, step_failed
from cluster.supervisor.heartbeat import Hang, Heartbeats
from cluster.supervisor.launcher import RankHandle
from cluster.supervisor.ray_calls import result_future


@dataclass(frozen=True)
class EpochFailure:
    """Why an epoch ended.

    ranks    the ranks that ended first, or hang
    failed   the rank that failed in its own step, if one did
    hang     the ranks that hang, if that is the reason
    """

    reason: str
    ranks: frozenset[int]
    failed: frozenset[int] = frozenset()
    hang: Hang | None = None


async def watch(
    ranks: Sequence[RankHandle], epoch: int, heartbeats: Heartbeats, change: PendingChange
) -> EpochFailure | None:
    """Return the first failure of a rank, or None when a change is to begin."""
    done = [result_future(rank.done.remote(epoch)) for rank in ranks]
    hang = asyncio.create_task(heartbeats.watch(ranks))
    first = asyncio.create_task(first_failure(done))
    begins = asyncio.create_task(change.begins())
    try:
        await asyncio.wait({hang, first, begins}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (hang, first, begins):
            task.cancel()
    if first.done():
        ended = first.result()
        error, rank = ended.exception(), done.index(ended)
        failed = frozenset({rank} if error is not None and step_failed(error) else ())
        reason = failure_message(error) if error is not None else "left its loop"
        return EpochFailure(f"rank {rank}: {reason}", frozenset({rank}), failed)
    if hang.done():
        found = hang.result()
        return EpochFailure(found.reason, frozenset(found.ranks), hang=found)
    return None
