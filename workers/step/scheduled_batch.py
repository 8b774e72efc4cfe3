"""The work of one step on one rank, from the scheduler to the runner. Plain data.

B sequences, L rows with logits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from workers.step.sequence import DECODE, PROMPT, VERIFY, ScheduledSequence, Sequence
from workers.step.step_sync import ForwardMode

NO_DRAFT = int(np.iinfo(np.int64).min)
"""In place of a draft token behind the last row of a sequence: no draw has this number."""


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
    draws_late       a draw needs the token before it on the host, which the step before still computes
    decodes_next     a sequence with a new token may go on, and so decodes in the next step
    state_copies     (source slot, target slot) of states of linear attention, to copy in this order before the forward
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

    @classmethod
    def of(
        cls,
        parts: list[ScheduledSequence],
        admitted: Iterable[Sequence] = (),
        state_copies: tuple[tuple[int, int], ...] = (),
    ) -> "ScheduledBatch":
        """Return the batch of `parts` in any order."""
        single = [part for part in parts if part.num_new == 1]
        num_single_rows, num_verify = len(single), 0
        if num_single_rows < len(parts):
            several = [part for part in parts if part.num_new != 1]
            verify = [part for part in several if part.kind is VERIFY]
            num_verify = len(verify)
            parts = single + verify + [part for part in several if part.kind is not VERIFY]
        num_new = [part.num_new for part in parts]
        num_logits = np.array([part.num_logits for part in parts], dtype=np.int64)
        others = [part for part in parts if part.kind is not DECODE]
        logits_seqs = num_logits.nonzero()[0]
        logits_behind = np.zeros(len(logits_seqs), dtype=np.int64)
        drafts = None
        if any(part.num_logits > 1 for part in others):
            logits_seqs = np.repeat(np.arange(len(parts)), num_logits)
            logits_behind = num_logits.cumsum()[logits_seqs] - np.arange(1, len(logits_seqs) + 1)
            verifies = np.array([part.kind is VERIFY for part in parts])[logits_seqs]
            drafts = np.full(len(logits_seqs), NO_DRAFT)
            found = chain.from_iterable(part.draft_token_ids for part in others)
            drafts[verifies & (logits_behind > 0)] = list(found)
        return cls(
            parts=parts,
            seqs=[part.seq for part in parts],
            num_tokens=sum(num_new),
            num_single_rows=num_single_rows,
            num_verify=num_verify,
            prefill_tokens=sum(part.num_new for part in others if part.kind is PROMPT),
            num_new_tokens=np.array(num_new, dtype=np.int64),
            num_logits=num_logits,
            logits_seqs=logits_seqs,
            logits_behind=logits_behind,
            draft_token_ids=drafts,
            pooled_seqs=_pooled(parts) if any(part.gives_hidden for part in others) else [],
            admitted=list(admitted),
            has_adapters=any(part.seq.adapter_slot for part in parts),
            draws_late=any(part.seq.needs_last_token and part.seq.num_pending for part in parts),
            decodes_next=any(part.num_logits and _goes_on(part.seq) for part in parts),
            state_copies=state_copies,
        )

    @property
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


def _pooled(parts: list[ScheduledSequence]) -> list[int]:
    return [index for index, part in enumerate(parts) if part.gives_hidden]


def _goes_on(seq: Sequence) -> bool:
    """Return whether `seq` may have tokens behind its next token."""
    return len(seq.token_ids) + seq.num_pending + 1 < seq.max_num_tokens
