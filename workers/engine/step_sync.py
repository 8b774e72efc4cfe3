"""The step protocol: every rank votes one row, a pure function of all rows says what the step is.

Knows nothing of requests, tensors or transports. The rule it serves: between "what shall I run" and the
collectives of a step nothing that differs between ranks may influence a branch that leads to a collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Protocol

import numpy as np

HEALTHY = 0


class ForwardMode(IntEnum):
    """What a step does on one rank."""

    IDLE = 0
    DECODE = 1
    EXTEND = 2
    MIXED = 3


class GraphMode(IntEnum):
    """Which CUDA graphs a step replays. Those of MIXED take any step, those of DECODE only decodes, but faster."""

    NONE = 0
    MIXED = 1
    DECODE = 2


# The field of a Vote for each kind of graphs, the fastest kind first.
GRAPH_ROWS = {GraphMode.DECODE: "decode_rows", GraphMode.MIXED: "mixed_rows"}


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One rank's row, all int64, in this order.

    num_tokens       tokens it scheduled; 0 when it has none
    decode_rows      rows of the smallest DECODE graph that its part of the step fits into, 0 where none does;
                     a rank without tokens fits into any
    mixed_rows       the same of MIXED graphs
    wants_ubatch this rank would gain from two ubatches
    has_work         requests are queued or running here, scheduled or not
    health           HEALTHY, or not: then the group stops with this rank's name
    """

    epoch: int
    step: int
    num_tokens: int = 0
    decode_rows: int = 0
    mixed_rows: int = 0
    wants_ubatch: int = 0
    forward_mode: int = ForwardMode.IDLE
    has_work: int = 0
    wants_pause: int = 0
    wants_stop: int = 0
    health: int = HEALTHY

    def row(self) -> np.ndarray:
        """int64 [NUM_FIELDS]."""
        return np.array(tuple(self.__dict__.values()), dtype=np.int64)


FIELD_NAMES = tuple(field.name for field in fields(Vote))
NUM_FIELDS = len(FIELD_NAMES)


@dataclass(frozen=True)
class PlanConfig:
    """What `decide` must know besides the rows; equal on all ranks (compared at start-up)."""

    equal_tokens: bool
    num_ubatches: int = 2


@dataclass(frozen=True)
class StepPlan:
    """What this step is, the same on every rank.

    run                   a forward happens; otherwise the group goes to sleep
    num_tokens_across_dp  tokens each rank really has
    padded_tokens         the count all ranks run with, or 0 when the step runs ragged
    """

    run: bool
    num_tokens_across_dp: tuple[int, ...]
    padded_tokens: int = 0
    graph_mode: GraphMode = GraphMode.NONE
    ubatch: bool = False
    pause: bool = False
    stop: bool = False

    def tokens_to_run(self, rank: int) -> int:
        """Rows of `rank`'s forward, padding included; at least one, so that idle ranks run along."""
        return self.padded_tokens or max(1, self.num_tokens_across_dp[rank])


class LockstepError(RuntimeError):
    """The ranks are no longer in step, or one of them is unhealthy: the group cannot go on.

    Its cause is what went wrong on this rank; without one it was another's fault.
    """


class VoteTransport(Protocol):
    """Gathers one row of every rank; raises LockstepError when a rank does not come in time."""

    def all_gather(self, row: np.ndarray) -> np.ndarray:
        """int64 [n] of this rank -> int64 [num_ranks, n], in rank order."""


def decide(rows: np.ndarray, config: PlanConfig) -> StepPlan:
    """The step of the group, from the votes of all ranks: int64 [num_ranks, NUM_FIELDS].

    Raises LockstepError, on every rank alike, when epochs or steps differ or a rank is unhealthy.
    """
    columns = dict(zip(FIELD_NAMES, rows.T.tolist(), strict=True))
    _check_lockstep(columns)
    num_tokens = columns["num_tokens"]
    if any(columns["wants_stop"]):
        return StepPlan(False, tuple(num_tokens), stop=True)
    if any(columns["wants_pause"]):
        return StepPlan(False, tuple(num_tokens), pause=True)
    if not any(num_tokens):
        # Work without tokens would mean a scheduler that cannot make progress alone.
        assert not any(columns["has_work"]), f"ranks have work but no tokens: {columns}"
        return StepPlan(False, tuple(num_tokens))

    graph_mode, padded = _graph(columns)
    ubatch = all(columns["wants_ubatch"]) and _last_slice_has_tokens(
        min(filter(None, num_tokens)), padded, config.num_ubatches
    )
    equal = config.equal_tokens or graph_mode > GraphMode.NONE or ubatch
    return StepPlan(True, tuple(num_tokens), padded if equal else 0, graph_mode, ubatch)


def _graph(columns: dict[str, list[int]]) -> tuple[GraphMode, int]:
    """The fastest graphs that all ranks fit into, and their rows; the most tokens of a rank where there are none."""
    for mode, name in GRAPH_ROWS.items():
        if all(columns[name]):
            return mode, max(columns[name])
    return GraphMode.NONE, max(columns["num_tokens"])


def _check_lockstep(columns: dict[str, list[int]]) -> None:
    unhealthy = [rank for rank, health in enumerate(columns["health"]) if health != HEALTHY]
    if unhealthy:
        raise LockstepError(f"rank {unhealthy[0]} reports a failure; see its log")
    for name in ("epoch", "step"):
        if len(set(columns[name])) > 1:
            raise LockstepError(f"ranks disagree on the {name}: {columns[name]} (in rank order)")


def ubatch_borders(num_rows: int, num_ubatches: int) -> list[int]:
    """Where a ubatched step of `num_rows` rows is cut, 0 and `num_rows` included."""
    return [index * num_rows // num_ubatches for index in range(num_ubatches + 1)]


def _last_slice_has_tokens(fewest: int, padded: int, num_ubatches: int) -> bool:
    """Of the rank with the fewest tokens among those that have any; the others run along with padding."""
    return num_ubatches <= padded and ubatch_borders(padded, num_ubatches)[-2] < fewest


def compare_settings(settings: Sequence[dict[str, object]]) -> None:
    """Refuse to start when ranks differ in any setting. Raises ValueError naming each difference.

    Ranks with different backends or limits would wait for each other for ever.
    """
    first = settings[0]
    problems = [
        f"{key}: rank 0 has {first.get(key)!r}, rank {rank} has {other.get(key)!r}"
        for rank, other in enumerate(settings)
        for key in sorted(first.keys() | other.keys())
        if first.get(key) != other.get(key)
    ]
    if problems:
        raise ValueError("ranks were started with different settings:\n  " + "\n  ".join(problems))
