"""The work of one step on one rank, from the scheduler to the runner. Plain data.

B sequences, L rows with logits.
"""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from workers.step.sequence import PROMPT, VERIFY, ScheduledSequence, Sequence, rows_of
from workers.step.step_sync import ForwardMode

NO_DRAFT = int(np.iinfo(np.int64).min)
"""In place of a draft token behind the last row of a sequence: no draw has this number."""
NEVER_DRAWN = int(np.iinfo(np.int64).max)
"""In place of NO_DRAFT on a device, where negative numbers refer to drafts."""

_num_new, _num_logits = attrgetter("num_new"), attrgetter("num_logits")
_draft_token_ids = attrgetter("draft_token_ids")
_needs_last_token, _adapter_slot = attrgetter("needs_last_token"), attrgetter("adapter_slot")
_num_pending = attrgetter("num_pending")


@dataclass(frozen=True)
class ScheduledBatch:
    """Work of one step. Sequences with one row come first, because attention computes one row as a decode; then those
    with drafts, because linear attention computes them as decodes too.

    num_tokens       rows of the forward, without padding
    num_single_rows  how many sequences have one row: all decodes, and prompts of which one token is left
    num_verify       how many sequences behind them have drafts
    prefill_tokens   tokens of sequences of kind PROMPT
    num_new_tokens   int64 [B], rows of each sequence
    num_logits       int64 [B], rows with logits of each sequence
    logits_seqs      int64 [L], index of the sequence of each row with logits
    logits_behind    int64 [L], how many rows the sequence has behind this row
    draft_token_ids  int64 [L], the draft that each draw verifies, or its reference as in Drafts, or NO_DRAFT; None: no
                     sequence has several draws
    pooled_seqs      indices of the sequences that give hidden states for their vectors, or end with them
    admitted         sequences that moved into their rows since the last launched step
    has_adapters     a sequence has an adapter
    draws_late       a draw needs tokens before it, or their number, on the host, and the step before computes them yet
    decodes_next     a sequence with a new token may go on, and so decodes in the next step
    state_copies     (source slot, target slot) of states of linear attention, to copy in this order before the forward
    given            the parts in the order in which they were scheduled
    """

    parts: list[ScheduledSequence]
    seqs: list[Sequence]
    num_tokens: int
    num_single_rows: int
    num_verify: int
    prefill_tokens: int
    num_new_tokens: np.ndarray
    num_logits: np.ndarray
    logits_seqs: np.ndarray
    logits_behind: np.ndarray
    draft_token_ids: np.ndarray | None
    pooled_seqs: list[int]
    admitted: list[Sequence]
    has_adapters: bool
    draws_late: bool
    decodes_next: bool
    state_copies: tuple[tuple[int, int], ...]
    given: list[ScheduledSequence]

    @classmethod
    def of(
        cls,
        parts: list[ScheduledSequence],
        admitted: Iterable[Sequence] = (),
        state_copies: tuple[tuple[int, int], ...] = (),
        last: "ScheduledBatch | None" = None,
    ) -> "ScheduledBatch":
        """Return the batch of `parts` in any order.

        last   a batch of which the sequences have kept their rows: its arrays are used again if it has the same parts
        """
        admitted, seqs = list(admitted), [part.seq for part in parts]
        changing: dict[str, Any] = {
            "draws_late": _draws_late(parts, seqs),
            "decodes_next": any(part.num_logits and _goes_on(part.seq) for part in parts),
        }
        if last is not None and last.given == parts and not (admitted or state_copies):
            return last if last.changing == changing else replace(last, **changing)
        given, single = parts, [part for part in parts if part.num_new == 1]
        verify: list[ScheduledSequence] = []
        if len(single) < len(parts):
            several = [part for part in parts if part.num_new != 1]
            verify = [part for part in several if part.kind is VERIFY]
            parts = single + verify + [part for part in several if part.kind is not VERIFY]
            seqs = [part.seq for part in parts]
        prompts = [part for part in parts if part.kind is PROMPT]
        num_logits = num_new = _column(_num_new, parts)
        if prompts:
            num_logits = _column(_num_logits, parts)
        logits_seqs = num_logits.nonzero()[0]
        logits_behind = np.zeros(len(logits_seqs), dtype=np.int64)
        drafts = None
        if verify or any(part.num_logits > 1 for part in prompts):
            logits_seqs = np.repeat(np.arange(len(parts)), num_logits)
            logits_behind = num_logits.cumsum()[logits_seqs] - np.arange(1, len(logits_seqs) + 1)
            is_verified = (logits_behind > 0) & (logits_seqs < len(single) + len(verify))
            drafts = _drafts(verify, is_verified)
        return cls(
            parts=parts,
            seqs=seqs,
            num_tokens=int(num_new.sum()),
            num_single_rows=len(single),
            num_verify=len(verify),
            prefill_tokens=sum(part.num_new for part in prompts),
            num_new_tokens=num_new,
            num_logits=num_logits,
            logits_seqs=logits_seqs,
            logits_behind=logits_behind,
            draft_token_ids=drafts,
            pooled_seqs=_pooled(parts) if any(part.gives_hidden for part in prompts) else [],
            admitted=admitted,
            has_adapters=any(map(_adapter_slot, seqs)),
            state_copies=state_copies,
            given=given,
            **changing,
        )

    @property
    def compared_drafts(self) -> np.ndarray:
        """`draft_token_ids` as a device compares them with draws, NEVER_DRAWN in place of NO_DRAFT."""
        assert self.draft_token_ids is not None, "no sequence has several draws"
        found: np.ndarray = np.where(
            self.draft_token_ids == NO_DRAFT, NEVER_DRAWN, self.draft_token_ids
        )
        return found

    def with_drafts(self, draft_token_ids: np.ndarray) -> "ScheduledBatch":
        """Return the batch with these `draft_token_ids`, and with its rows, which ended sequences have lost since."""
        found = copy(self)  # `replace` would leave out the cached properties
        object.__setattr__(found, "draft_token_ids", draft_token_ids)
        return found

    @property
    def changing(self) -> dict[str, Any]:
        """The fields that may differ from step to step though the parts are the same."""
        return {"draws_late": self.draws_late, "decodes_next": self.decodes_next}

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 [B], the row in the InputBatch of each sequence. To be read first before the launch."""
        return rows_of(self.seqs)

    @cached_property
    def query_start_loc(self) -> np.ndarray:
        """int32 [B + 1], the first row of each sequence, and the number of all rows."""
        starts = np.zeros(len(self.seqs) + 1, dtype=np.int32)
        np.cumsum(self.num_new_tokens, out=starts[1:])
        return starts

    @cached_property
    def _places(self) -> np.ndarray:
        starts = self.query_start_loc[:-1]
        places: np.ndarray = np.arange(self.num_tokens) - np.repeat(starts, self.num_new_tokens)
        return places

    def positions(self, starts_B: np.ndarray) -> np.ndarray:
        """Return the position of each row, int64 [T], from that of the first row of each sequence."""
        if self.num_tokens == len(starts_B):
            return starts_B
        positions: np.ndarray = np.repeat(starts_B, self.num_new_tokens) + self._places
        return positions

    @cached_property
    def row_of_token(self) -> np.ndarray:
        """int64 [T], `rows` of the sequence of each row."""
        if self.num_tokens == len(self.seqs):
            return self.rows
        return np.repeat(self.rows, self.num_new_tokens)

    @cached_property
    def logits_rows(self) -> np.ndarray:
        """int64 [L], the row of the forward of each row with logits."""
        rows: np.ndarray = self.query_start_loc[self.logits_seqs + 1] - 1 - self.logits_behind
        return rows

    @cached_property
    def drawing_seqs(self) -> np.ndarray:
        """int64 [S], the indices of the sequences with rows with logits."""
        return np.flatnonzero(self.num_logits)

    @cached_property
    def first_logits(self) -> np.ndarray:
        """int64 [S], the first row of each of `drawing_seqs` among the rows with logits."""
        num_logits = self.num_logits[self.drawing_seqs]
        firsts: np.ndarray = num_logits.cumsum() - num_logits
        return firsts

    @cached_property
    def verify_logits(self) -> np.ndarray:
        """The indices of the rows with logits of which the draws verify drafts, int64."""
        assert self.draft_token_ids is not None, "no sequence has several draws"
        return np.flatnonzero(self.draft_token_ids != NO_DRAFT)

    @cached_property
    def logits_places(self) -> np.ndarray:
        """int64 [L], the place of each row with logits among those of its sequence, from 0."""
        places: np.ndarray = self.num_logits[self.logits_seqs] - 1 - self.logits_behind
        return places

    @property
    def has_prompts(self) -> bool:
        """Whether a sequence of kind PROMPT has several rows."""
        return self.prefill_tokens > 0 and any(
            part.kind is PROMPT and part.num_new > 1 for part in self.parts
        )

    @property
    def forward_mode(self) -> ForwardMode:
        """EXTEND, DECODE, MIXED or IDLE."""
        return ForwardMode.of(len(self.seqs), self.num_single_rows)


def _column(field: Callable[[Any], int], parts: list[ScheduledSequence]) -> np.ndarray:
    return np.fromiter(map(field, parts), np.int64, len(parts))


def _drafts(verify: list[ScheduledSequence], is_verified_L: np.ndarray) -> np.ndarray:
    drafts = np.full(len(is_verified_L), NO_DRAFT)
    found = chain.from_iterable(map(_draft_token_ids, verify))
    drafts[is_verified_L] = np.fromiter(found, np.int64)
    return drafts


def _pooled(parts: list[ScheduledSequence]) -> list[int]:
    return [index for index, part in enumerate(parts) if part.gives_hidden]


def _draws_late(parts: list[ScheduledSequence], seqs: list[Sequence]) -> bool:
    """Return whether a draw needs pending tokens of its sequence, or their number, on the host."""
    most = max(map(_num_pending, seqs), default=0)
    if most > 1:  # a sequence has an unknown length
        return True
    has_several = most and max(map(_num_new, parts)) > 1
    if has_several and any(part.kind is VERIFY and part.seq.num_pending for part in parts):
        return True
    return any(seq.num_pending for seq in filter(_needs_last_token, seqs))


def _goes_on(seq: Sequence) -> bool:
    """Return whether `seq` may have tokens behind its next token."""
    return len(seq.token_ids) + seq.num_pending + 1 < seq.max_num_tokens
