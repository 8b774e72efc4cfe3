"""Signs of life of a group's ranks, by which a rank that is stopped or stuck is noticed.

The vote is the heartbeat. A rank reports the number of its votes, the activity of its step loop, and on CPUs the
processor time of the loop, because a step of a long prompt may take minutes there, unless the step is overdue. Three
kinds of ranks hang:

silent   no answer: the process is stopped, or its node cannot be reached
stuck    it is in a step, and neither votes nor computes, or computes for far longer than other steps of its size; or
         it captures a CUDA graph for longer than a capture takes
deaf     it sleeps although a peer waits for its vote

A rank that waits in a vote waits for its peers and never hangs itself. Knows nothing of rebuilds.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayTaskError

from cluster.supervisor.ray_calls import result_future
from cluster.supervisor.slow_ranks import SlowRanks
from workers.rank.rank_info import Pulse

T = TypeVar("T")

CHECKS = 8
"""Checks within the time limit. Only checks count, so that a supervisor that was itself stopped blames no rank."""
MIN_CPU_S = 1e-3
"""Processor time between two checks that counts as progress."""
STAGE_FACTOR = 4
"""Time limit of a silent rank in a stage of a rebuild, in multiples of the limit in service, because allocations and
compilers may hold the interpreter's lock for seconds."""
CAPTURE_FACTOR = 12
"""Time limit of a capture on demand, in multiples of the limit of a step: some take more than 5 s, while peers wait."""


@dataclass(frozen=True)
class Hang:
    """Ranks that hang, `seconds` after their last sign of life.

    ranks   they get new processes at once; empty if several ranks are stuck, because one of them may be the cause
            while the others wait for it in a collective
    """

    ranks: frozenset[int]
    reason: str
    seconds: float


class HungRankError(RuntimeError):
    """A rank gave no sign of life in a stage of a start or rebuild."""

    def __init__(self, hang: Hang):
        super().__init__(hang.reason)
        self.hang = hang


class Heartbeats:
    """The signs of life of the ranks of one epoch.

    hang_timeout_s  cluster.hang_timeout_s
    cpu_counts      processor time of a step loop counts as progress; on a GPU the loop may wait actively for ever
    slow_ranks      takes the work of the ranks; those that it wants to replace count as hung
    """

    def __init__(
        self,
        num_ranks: int,
        hang_timeout_s: float,
        *,
        cpu_counts: bool,
        slow_ranks: SlowRanks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limit_s = hang_timeout_s
        self._cpu_counts = cpu_counts
        self._slow_ranks = slow_ranks or SlowRanks()
        self._clock = clock
        self._pulses: list[Pulse | None] = [None] * num_ranks
        self._silent = [0] * num_ranks  # checks in a row
        self._still = [0] * num_ranks
        self._voted = [clock()] * num_ranks

    async def watch(self, ranks: Sequence[Any]) -> Hang:
        """Return when a rank of a serving group hangs."""
        return await self._watch(dict(enumerate(ranks)), CHECKS)

    async def guard(self, ranks: Mapping[int, Any], stage: Awaitable[T]) -> T:
        """Return the result of `stage`. Raises HungRankError when one of `ranks` is silent in it for too long."""
        running = asyncio.ensure_future(stage)
        watching = asyncio.create_task(self._watch(ranks, CHECKS * STAGE_FACTOR))
        try:
            await asyncio.wait({watching, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            raise HungRankError(watching.result())
        finally:
            watching.cancel()
            running.cancel()

    def vote_ages(self) -> list[float]:
        """Return the seconds since the last vote of each rank; 0 for a rank that sleeps."""
        now = self._clock()
        return [
            0.0 if pulse is None or self._sleeps(pulse) else now - voted
            for pulse, voted in zip(self._pulses, self._voted, strict=True)
        ]

    async def _watch(self, ranks: Mapping[int, Any], limit: int) -> Hang:
        calls = {index: _pulse(rank) for index, rank in ranks.items()}
        try:
            while True:
                await asyncio.sleep(self._limit_s / CHECKS)
                answers: list[Pulse | None] = [None] * len(self._pulses)
                for index, call in calls.items():
                    self._silent[index] += 1
                    if call.done():
                        calls[index] = _pulse(ranks[index])
                        error = call.exception()
                        if error is None:
                            answers[index] = call.result()
                        if error is None or isinstance(error, RayTaskError):  # raised by the rank
                            self._silent[index] = 0
                self.take(answers)
                hang = self.verdict(limit)
                if hang is not None:
                    return hang
        finally:
            for call in calls.values():
                call.cancel()

    def take(self, pulses: Sequence[Pulse | None]) -> None:
        """Compare new pulses with those of the check before; None for a rank without an answer or a loop."""
        for rank, pulse in enumerate(pulses):
            if pulse is None:
                continue
            before, self._pulses[rank] = self._pulses[rank], pulse
            if before is None or pulse.step != before.step or self._sleeps(pulse):
                self._voted[rank] = self._clock()
            still = before is not None and not self._moved(before, pulse)
            self._still[rank] = self._still[rank] + 1 if still else 0
        self._slow_ranks.take([None if pulse is None else pulse.work for pulse in pulses])

    def verdict(self, limit: int = CHECKS) -> Hang | None:
        """Return the ranks that have hung for `limit` checks, or a slow rank to replace, if any."""
        seconds = limit * self._limit_s / CHECKS
        key = "cluster.hang_timeout_s" + (f" x {STAGE_FACTOR}" if limit > CHECKS else "")
        silent = [rank for rank, checks in enumerate(self._silent) if checks >= limit]
        if silent:
            reason = f"no sign of life for {seconds:g} s ({key})"
            return Hang(frozenset(silent), f"{_names(silent)}: {reason}", seconds)
        stuck = [r for r, checks in enumerate(self._still) if checks >= limit * self._patience(r)]
        if not stuck:
            slow = self._slow_ranks.due()
            return None if slow is None else Hang(frozenset({slow.rank}), *slow[1:])
        pulse = self._pulses[stuck[0]]
        assert pulse is not None
        where = _STUCK[pulse.activity]
        if pulse.activity == "capture":
            seconds, key = seconds * CAPTURE_FACTOR, f"{key} x {CAPTURE_FACTOR}"
        reason = f"{_names(stuck)}: {where} step {pulse.step} for {seconds:g} s ({key})"
        return Hang(frozenset(stuck if len(stuck) == 1 else ()), reason, seconds)

    def _moved(self, before: Pulse, now: Pulse) -> bool:
        if now.step != before.step or now.activity == "vote":
            return True
        if now.activity == "sleep":
            return self._sleeps(now)
        return before.activity != now.activity or (
            self._cpu_counts and not now.overdue and now.cpu_s - before.cpu_s >= MIN_CPU_S
        )

    def _patience(self, rank: int) -> int:
        pulse = self._pulses[rank]
        return CAPTURE_FACTOR if pulse is not None and pulse.activity == "capture" else 1

    def _sleeps(self, pulse: Pulse) -> bool:
        """Return whether a rank sleeps and no peer waits for its vote."""
        if pulse.activity != "sleep":
            return False
        return not any(
            peer is not None and peer.activity == "vote" and peer.step >= pulse.step
            for peer in self._pulses
        )


_STUCK = {
    "step": "stuck in",
    "capture": "stuck in the capture of a CUDA graph for",
    "sleep": "asleep before",
}


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _pulse(rank: Any) -> "asyncio.Future[Pulse | None]":
    return result_future(rank.pulse.remote())
