"""The step protocol: every rank votes with one row, and a pure function of all rows returns the plan of the step.

Knows nothing of requests, tensors or transports. Its rule: between the vote and the collectives of a step, nothing
that differs between ranks may influence a branch that leads to a collective.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, reduce
from operator import or_
from typing import Any, Protocol

import numpy as np

from workers.step.draft_budget import DraftBudget, DraftVotes
from workers.step.vote import HEALTHY, NUM_WORDS, columns_of


class ForwardMode(IntEnum):
    """The forward of one rank in a step by the rows of its sequences: one each, several each, both, or no sequences.

    A prompt of which one token is left takes part in a DECODE forward, drafts take part in an EXTEND forward.
    """

    IDLE = 0
    DECODE = 1
    EXTEND = 2
    MIXED = 3

    @classmethod
    def of(cls, num_seqs: int, num_single_rows: int) -> "ForwardMode":
        """Return the mode of a forward of `num_seqs` sequences, of which `num_single_rows` have one row."""
        if not num_seqs:
            return cls.IDLE
        if num_single_rows == num_seqs:
            return cls.DECODE
        return cls.MIXED if num_single_rows else cls.EXTEND

    def is_idle(self) -> bool:
        """No sequences."""
        return self is ForwardMode.IDLE

    def is_decode(self) -> bool:
        """One row for each sequence."""
        return self is ForwardMode.DECODE

    def is_extend(self) -> bool:
        """Several rows for each sequence."""
        return self is ForwardMode.EXTEND

    def is_mixed(self) -> bool:
        """Sequences with one row and sequences with several."""
        return self is ForwardMode.MIXED

    def is_decode_or_idle(self) -> bool:
        """No sequence with several rows."""
        return self.is_decode() or self.is_idle()

    def is_extend_or_mixed(self) -> bool:
        """A sequence with several rows."""
        return self.is_extend() or self.is_mixed()


class GraphMode(IntEnum):
    """CUDA graphs that a step replays. MIXED graphs run any step; DECODE graphs run decodes only, but faster.

    VERIFY graphs run decodes and drafts, with logits of all rows as DECODE graphs. DRAFT graphs run passes of a draft
    model behind a step of any kind; no step has that kind.
    """

    NONE = 0
    MIXED = 1
    DECODE = 2
    VERIFY = 3
    DRAFT = 4

    @property
    def takes_several_rows(self) -> bool:
        """Whether a sequence may have several rows."""
        return self in (GraphMode.MIXED, GraphMode.VERIFY)

    @property
    def gives_logits(self) -> bool:
        """Whether the graph computes the logits of all rows."""
        return self in (GraphMode.DECODE, GraphMode.VERIFY)


# Field of a Vote by kind of graphs, the fastest kind first.
GRAPH_ROWS = {
    GraphMode.DECODE: "decode_rows",
    GraphMode.VERIFY: "verify_rows",
    GraphMode.MIXED: "mixed_rows",
}


LOAD_STEPS = 16
"""Steps between two readings of the experts' load. The step behind each is read too: their difference is one step."""
REASON_ROWS = 10  # rows that carry the reason of a failure after the vote


@dataclass(frozen=True)
class PlanConfig:
    """Settings that `decide` needs beside the rows; equal on all ranks (compared at start-up)."""

    equal_tokens: bool
    num_ubatches: int = 2
    drafts: DraftBudget = field(default_factory=DraftBudget)


@dataclass(frozen=True)
class StepPlan:
    """The step of the group, equal on every rank.

    run                   the ranks run a forward; otherwise the group sleeps
    decodes               a rank has tokens behind a prompt, so streams wait for the step
    num_tokens_across_dp  tokens of each rank, without padding
    padded_tokens         rows that every rank runs, or 0 if the step runs ragged
    prefill_tokens        most prompt tokens of a rank
    prefill_cap           most prompt tokens of a rank in the next step, because a rank decodes in it; 0 = no rank does
    draft_reads           draft models read the step, on all ranks
    draft_steps           tokens that draft models draft of each sequence, on all ranks
    draft_rows            rows of every rank in the passes that draft the second token and later ones
    verifies              a rank verifies drafts
    draft_votes           what `draft_limit` follows from; None: no rank has drafts
    load_step             number of this step if all ranks read the counts of their experts' rows behind it
    move                  number of the move of experts that all ranks stage; 0 = none, or not all of them yet
    move_commit           layers of the move of experts that all ranks have committed before this step, its first ones
    move_cancelled        number of the move that all ranks cancel before this step; 0 = none
    move_late             ranks that have staged the fewest layers of the cancelled move
    calm                  no rank has requests
    adapters              a rank has rows with adapters
    adapter_slots         slots of the adapters of running sequences of any rank, as in Vote
    adapters_wanted       ids of adapters that are to come into slots, in the order of the ranks
    """

    run: bool
    num_tokens_across_dp: tuple[int, ...]
    padded_tokens: int = 0
    graph_mode: GraphMode = GraphMode.NONE
    ubatch: bool = False
    stop: bool = False
    decodes: bool = False
    prefill_tokens: int = 0
    prefill_cap: int = 0
    draft_reads: bool = False
    draft_steps: int = 0
    draft_rows: int = 0
    verifies: bool = False
    draft_votes: DraftVotes | None = field(default=None, compare=False)
    load_step: int | None = None
    move: int = 0
    move_commit: int = 0
    move_cancelled: int = 0
    move_late: tuple[int, ...] = ()
    calm: bool = False
    adapters: bool = False
    adapter_slots: int = 0
    adapters_wanted: tuple[int, ...] = ()

    @cached_property
    def draft_limit(self) -> int | None:
        """Rows up to which every rank adds drafts to the decodes of the next step; 0 = no drafts.

        None: no rank has any, and the last limit holds.
        """
        return None if self.draft_votes is None else self.draft_votes.limit()

    @property
    def sleeps(self) -> bool:
        """Whether no rank has anything to do, now or in the next step."""
        return not self.run and not self.adapters_wanted

    def tokens_to_run(self, rank: int) -> int:
        """Return the rows of `rank`'s forward with padding; at least one, because idle ranks run along."""
        return self.padded_tokens or max(1, self.num_tokens_across_dp[rank])


class LockstepError(RuntimeError):
    """The ranks are out of step, or one of them is unhealthy: the group cannot go on.

    Its cause is the failure of this rank; without a cause, another rank failed.
    """


class UnhealthyRankError(LockstepError):
    """`rank` voted unhealthy. All ranks raise this together, so `gather_reasons` may follow."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} reports a failure")
        self.rank = rank


class AbortedError(LockstepError):
    """The epoch was aborted: the output of a step may be undefined."""

    def __init__(self) -> None:
        super().__init__("the epoch was aborted")


class VoteTransport(Protocol):
    """Gathers one row of every rank; raises LockstepError if a rank's row does not arrive in time."""

    def all_gather(self, row: np.ndarray) -> np.ndarray:
        """int64 [n] of this rank -> int64 [num_ranks, n], in rank order."""


def decide(rows: np.ndarray, config: PlanConfig) -> StepPlan:
    """Return the plan of a step from the votes of all ranks, int64 [num_ranks, NUM_WORDS].

    Raises LockstepError, on every rank alike, if epochs or steps differ or a rank is unhealthy.
    """
    columns = columns_of(rows)
    _check_lockstep(columns)
    num_tokens = columns["num_tokens"]
    if any(columns["wants_stop"]):
        return StepPlan(False, tuple(num_tokens), stop=True)
    if not any(num_tokens):
        # A scheduler with work schedules tokens once no step is in flight, unless adapters have to come into slots.
        assert any(columns["adapter_wanted"]) or not any(columns["has_work"]), (
            f"ranks have work but no tokens: {columns}"
        )
        calm = not any(columns["has_requests"])
        return StepPlan(False, tuple(num_tokens), calm=calm, **_adapters(columns), **_move(columns))

    graph_mode, padded = _graph(columns)
    ubatch = all(columns["wants_ubatch"]) and _last_ubatch_has_tokens(
        min(filter(None, num_tokens)), padded, config.num_ubatches
    )
    equal = config.equal_tokens or graph_mode > GraphMode.NONE or ubatch
    return StepPlan(
        True,
        tuple(num_tokens),
        padded if equal else 0,
        graph_mode,
        ubatch,
        decodes=num_tokens != columns["prefill_tokens"],
        prefill_tokens=max(columns["prefill_tokens"]),
        prefill_cap=min(filter(None, columns["prefill_cap"]), default=0),
        draft_reads=any(columns["draft_reads"]),
        draft_steps=max(columns["draft_steps"]),
        draft_rows=max(columns["draft_rows"]),
        verifies=any(columns["verifies"]),
        draft_votes=DraftVotes(config.drafts, columns),
        load_step=columns["step"][0] if columns["step"][0] % LOAD_STEPS < 2 else None,
        **_move(columns),
        **_adapters(columns),
    )


def _adapters(columns: dict[str, list[int]]) -> dict[str, Any]:
    """Return the fields of a plan that concern adapters."""
    return {
        "adapters": any(columns["adapter_rows"]),
        "adapter_slots": reduce(or_, columns["adapter_slots"]),
        "adapters_wanted": tuple(filter(None, columns["adapter_wanted"])),
    }


def _graph(columns: dict[str, list[int]]) -> tuple[GraphMode, int]:
    """Return the fastest kind of graphs that fits all ranks, and its rows; without one, the most tokens of a rank."""
    for mode, name in GRAPH_ROWS.items():
        if all(columns[name]):
            return mode, max(columns[name])
    return GraphMode.NONE, max(columns["num_tokens"])


def _move(columns: dict[str, list[int]]) -> dict[str, Any]:
    """Return the fields of the plan about a move of experts: layers are committed when all ranks have staged them."""
    moves, staged = columns["move"], columns["move_staged"]
    cancelled = max(columns["move_cancel"])
    if cancelled:
        done = [at if move == cancelled else -1 for move, at in zip(moves, staged, strict=True)]
        late = tuple(rank for rank, at in enumerate(done) if at == min(done))
        return {"move_cancelled": cancelled, "move_late": late}
    if min(moves) > 0 and len(set(moves)) == 1:
        return {"move": moves[0], "move_commit": min(staged)}
    return {}


def _check_lockstep(columns: dict[str, list[int]]) -> None:
    unhealthy = [rank for rank, health in enumerate(columns["health"]) if health != HEALTHY]
    if unhealthy:
        raise UnhealthyRankError(unhealthy[0])
    for name in ("epoch", "step"):
        if len(set(columns[name])) > 1:
            raise LockstepError(f"ranks disagree on the {name}: {columns[name]} (in rank order)")


def gather_reasons(transport: VoteTransport, reason: str) -> list[str]:
    """Collective after a vote with an unhealthy rank: return each rank's `reason`, cut to REASON_ROWS rows."""
    size = REASON_ROWS * NUM_WORDS * 8
    data = bytearray(reason.encode(errors="replace")[:size].ljust(size, b"\0"))
    rows = np.frombuffer(data, dtype=np.int64).reshape(REASON_ROWS, NUM_WORDS)
    gathered = np.concatenate([transport.all_gather(row).copy() for row in rows], axis=1)
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in gathered]


def ubatch_borders(num_rows: int, num_ubatches: int) -> list[int]:
    """Return the rows at which a step of `num_rows` rows is cut, 0 and `num_rows` included."""
    return [index * num_rows // num_ubatches for index in range(num_ubatches + 1)]


def _last_ubatch_has_tokens(fewest: int, padded: int, num_ubatches: int) -> bool:
    """Return whether the last ubatch has a token on the rank with the fewest tokens; idle ranks run padding alone."""
    return num_ubatches <= padded and ubatch_borders(padded, num_ubatches)[-2] < fewest


def compare_settings(settings: Sequence[Mapping[str, object]], what: str = "settings") -> None:
    """Raise ValueError with each difference between the settings, or `what` else, of the ranks.

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
        raise ValueError(f"ranks were started with different {what}:\n  " + "\n  ".join(problems))
