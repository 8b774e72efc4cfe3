"""One request on a rank, and the arrays of all running sequences, one row each. Knows no scheduling and no model."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

import numpy as np

from workers.step.grammar import Grammar
from workers.step.images import SequenceImages
from workers.wire.request import EngineRequest, FinishReason


class SequenceKind(Enum):
    """What a sequence computes in a step.

    PROMPT   tokens that it had when it moved into its row, of the prompt or from before a preemption
    DECODE   the token drawn last
    VERIFY   the token drawn last and draft tokens behind it, with logits at each
    """

    PROMPT = "prompt"
    DECODE = "decode"
    VERIFY = "verify"


# Members by short names, because access through the class takes ten times as long.
PROMPT, DECODE, VERIFY = SequenceKind


@dataclass(eq=False, slots=True)  # Not frozen: that takes most of the time to make one.
class ScheduledSequence:
    """The part of one sequence in a step. Nothing changes it.

    num_new          tokens that the step computes, one row of the forward each
    num_logits       how many of these rows, the last ones, give logits, from each of which a token is drawn
    hidden_rows      which of these rows, from 0, give hidden states for the vector of the sequence
    ends_vector      the vector is complete after this part
    draft_token_ids  all tokens but the first of a VERIFY part, or their references as in Drafts; the draw of the row
                     before a draft verifies the draft
    """

    seq: "Sequence"
    kind: SequenceKind
    num_new: int
    num_logits: int
    draft_token_ids: tuple[int, ...] = ()
    hidden_rows: range = range(0)
    ends_vector: bool = False

    @property
    def gives_hidden(self) -> bool:
        """Whether the part adds to the vector of the sequence, or ends it."""
        return self.ends_vector or bool(self.hidden_rows)


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and its progress.

    The K and V of tokens `[0, num_computed_tokens)` are in the cache, or will be when the launched steps are done.
    Later launches find them there. While a launched step verifies drafts, num_computed_tokens counts them all as right.

    row                row in the InputBatch while it runs, -1 while it waits
    order              (priority, arrival); smaller comes first
    max_num_tokens     prompt and output tokens at which the sequence ends
    block_keys         keys of the first full KV blocks, as far as they were needed; see workers/kv_cache/
    next_full          number of computed tokens at which another block is full and gets its key
    capacity           number of tokens up to which the KV cache has nothing to change for the sequence
    num_cached_tokens  tokens found in the prefix cache when the sequence first ran
    grammar            grammar of the output and its state; None = any output
    num_prefill_tokens tokens that it had when it moved into its row: it is a prompt until they are computed
    decode_part        its part in each step in which it decodes; None while it has no row
    verify_part        its part in the last step that verified drafts, which equal drafts share; None as decode_part
    draft_token_ids    guesses for its next tokens, for the next step to verify, or their references as in Drafts
    coming_drafts      references to drafts that follow the tokens which the last launched step draws
    num_pending        tokens that launched steps draw, at most, and that the host does not have yet
    needs_last_token   its logits processors or its grammar read the last token on the host
    speculates         a drafter reads the last token on the host before the next step
    adapter_slot       slot of its adapter while it has a row; 0: it has none
    load_tried         preemptions + 1 at its last attempt to load a prefix from outside the device; 0: none
    fetch_tried        its prefix was fetched from another node, or could not be
    stop_token_ids     those of the request, here because each step reads them
    finished           the request has ended; outputs of launched steps are dropped
    images             of its prompt; None: it has none
    """

    request: EngineRequest
    token_ids: list[int]
    num_computed_tokens: int = 0
    row: int = -1
    num_preemptions: int = 0
    order: tuple[int, int] = (0, 0)
    max_num_tokens: int = sys.maxsize
    block_keys: list[bytes] = field(default_factory=list)
    next_full: int = sys.maxsize
    capacity: int = 0
    num_cached_tokens: int = 0
    grammar: Grammar | None = None
    num_prefill_tokens: int = 0
    decode_part: ScheduledSequence | None = None
    verify_part: ScheduledSequence | None = None
    draft_token_ids: tuple[int, ...] = ()
    coming_drafts: tuple[int, ...] = ()
    num_pending: int = 0
    needs_last_token: bool = False
    speculates: bool = False
    adapter_slot: int = 0
    load_tried: int = 0
    fetch_tried: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    finished: bool = False
    images: SequenceImages | None = None

    @classmethod
    def from_request(cls, request: EngineRequest, max_model_len: int = sys.maxsize) -> "Sequence":
        """Return a sequence without computed tokens: prompt and emitted tokens are known."""
        longest = len(request.prompt_token_ids) + request.params.max_tokens
        known = request.prompt_token_ids + request.emitted_token_ids
        seq = cls(request, known, max_num_tokens=min(longest, max_model_len))
        seq.stop_token_ids = request.params.stop_token_ids
        if request.images:
            seq.images = SequenceImages(request.images, len(request.prompt_token_ids))
        return seq

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output that the host has."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def rope_delta(self) -> int:
        """Position of an output token for the rotary embedding, less its place."""
        return 0 if self.images is None else self.images.delta

    @property
    def kind(self) -> SequenceKind:
        """What the sequence computes next."""
        if self.num_computed_tokens < self.num_prefill_tokens:
            return PROMPT
        return VERIFY if self.draft_token_ids else DECODE

    @property
    def takes_drafts(self) -> bool:
        """Whether the next step may verify drafts: they follow a token that the host has, or pending tokens."""
        known = not self.num_pending or (bool(self.coming_drafts) and self.grammar is None)
        return known and self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def has_unknown_length(self) -> bool:
        """Whether a launched step verifies drafts: the host has not read yet how many of them are right."""
        return self.num_pending > 1

    @property
    def num_remaining(self) -> int:
        """Tokens without K and V in the cache, pending tokens and drafts included."""
        known = len(self.token_ids) + self.num_pending + len(self.draft_token_ids)
        return known - self.num_computed_tokens

    @property
    def ends_with_pending(self) -> bool:
        """Whether the pending token is the last token, whichever it is, or a launched step makes the vector."""
        if not self.num_pending:
            pooling = self.request.pooling
            return pooling is not None and self.num_computed_tokens == len(self.token_ids)
        return len(self.token_ids) + self.num_pending >= self.max_num_tokens

    def propose(self, draft_token_ids: Iterable[int]) -> None:
        """Let the next step verify drafts or references, as many as the sequence may have tokens before its last.

        `takes_drafts` must hold. Drafts end before the first that the grammar forbids.
        """
        drafts = tuple(draft_token_ids)
        assert not drafts or self.takes_drafts, f"{self.request.request_id} takes no drafts"
        left = max(0, self.max_num_tokens - 1 - len(self.token_ids) - self.num_pending)
        if len(drafts) > left:  # seldom: most sequences are far from their end
            drafts = drafts[:left]
        if self.grammar is not None and drafts:
            drafts = drafts[: self.grammar.num_allowed(drafts)]
        self.draft_token_ids = drafts

    def verified(self, num_rejected: int) -> None:
        """Let the K and V of `num_rejected` tokens of a launched step, its last ones, not count."""
        if self.row >= 0:  # otherwise it was preempted since, and nothing is computed
            self.num_computed_tokens -= num_rejected

    def part(self, kind: SequenceKind, num_new: int) -> ScheduledSequence:
        """Return the part of a step that computes the next `num_new` tokens; kind: the present one."""
        if kind is DECODE:
            assert self.decode_part is not None, f"{self.request.request_id} has no row"
            return self.decode_part
        if kind is VERIFY:
            drafts, part = self.draft_token_ids[: num_new - 1], self.verify_part
            if part is None or part.draft_token_ids != drafts:
                part = ScheduledSequence(self, kind, num_new, num_new, drafts)
                self.verify_part = part
            return part
        last, pooling = num_new == self.num_remaining, self.request.pooling
        if pooling is None:
            return ScheduledSequence(self, kind, num_new, int(last))
        start = self.num_computed_tokens
        rows = pooling.hidden_rows(start, start + num_new, last=last)
        return ScheduledSequence(self, kind, num_new, 0, hidden_rows=rows, ends_vector=last)

    def goes_on_behind(self, token_ids: list[int]) -> bool:
        """Return whether none of these next tokens can be the last one; False with a grammar."""
        return (
            self.grammar is None
            and len(self.token_ids) + len(token_ids) < self.max_num_tokens
            and self.stop_token_ids.isdisjoint(token_ids)
        )

    def finish_reason(self) -> FinishReason | None:
        """Return the reason why the token just appended is the last token, or None."""
        if self.token_ids[-1] in self.stop_token_ids:
            return "stop"
        if self.grammar is not None and self.grammar.complete:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_num_tokens else None


_row_of = attrgetter("row")


def rows_of(seqs: list[Sequence]) -> np.ndarray:
    """Return the rows of `seqs` in the InputBatch, int64 [B]; -1: the sequence has none."""
    return np.fromiter(map(_row_of, seqs), dtype=np.int64, count=len(seqs))


class InputBatch:
    """Tokens of the running sequences, one row each, so that a batch is gathered without Python loops.

    token_ids int32 [rows, max_model_len]; num_tokens (those that the host has), num_computed_tokens, adapter_slots and
    rope_deltas int64 [rows]. The groups of the KV cache keep what they have of each sequence by its row too.
    rope_deltas are those of SequenceImages.

    In place of a pending token, token_ids holds -1 - row: a forward finds the token on the device by that number. In
    place of draft k of K of a row, it may hold -1 - rows - (row * K + k).
    """

    def __init__(self, num_rows: int, max_model_len: int):
        self.token_ids = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_computed_tokens = np.zeros(num_rows, dtype=np.int64)
        self.adapter_slots = np.zeros(num_rows, dtype=np.int64)
        self.rope_deltas = np.zeros(num_rows, dtype=np.int64)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def add(self, seq: Sequence) -> None:
        """Assign a row to `seq` and copy its tokens there."""
        seq.row = self._free_rows.pop()
        seq.num_prefill_tokens = seq.num_tokens
        seq.decode_part = ScheduledSequence(seq, DECODE, 1, 1)
        self.token_ids[seq.row, : seq.num_tokens] = seq.token_ids
        self.num_tokens[seq.row] = seq.num_tokens
        self.num_computed_tokens[seq.row] = seq.num_computed_tokens
        self.adapter_slots[seq.row] = seq.adapter_slot
        self.rope_deltas[seq.row] = seq.rope_delta

    def remove(self, seq: Sequence) -> None:
        """Free the row of `seq`."""
        self._free_rows.append(seq.row)
        seq.row = -1
        # Parts refer to `seq`, which would live until the next collection of garbage.
        seq.decode_part = seq.verify_part = None
        seq.draft_token_ids = seq.coming_drafts = ()

    def committed(
        self,
        seqs: list[Sequence],
        counts: list[int],
        token_ids: list[int],
        num_logits_B: np.ndarray,
    ) -> None:
        """Enter the tokens that a step has given to `seqs`, in their lists already, and which drafts it rejected.

        token_ids      of all sequences, one after another; `counts` has their numbers, int [B]
        num_logits_B   int64, tokens that each sequence might have got
        """
        rows_B, counts_B = rows_of(seqs), np.array(counts, dtype=np.int64)
        token_ids_N = np.array(token_ids, dtype=np.int64)
        if len(rows_B) and rows_B.min() < 0:
            kept_B = rows_B >= 0
            token_ids_N = token_ids_N[np.repeat(kept_B, counts_B)]
            rows_B, counts_B, num_logits_B = rows_B[kept_B], counts_B[kept_B], num_logits_B[kept_B]
        num_rejected_B = num_logits_B - counts_B
        self.num_computed_tokens[rows_B] -= num_rejected_B
        starts_B = self.num_tokens[rows_B]
        self.num_tokens[rows_B] = starts_B + counts_B
        firsts_B = starts_B - counts_B.cumsum() + counts_B
        places_N = np.arange(len(token_ids_N)) + np.repeat(firsts_B, counts_B)
        self.token_ids[np.repeat(rows_B, counts_B), places_N] = token_ids_N
        if num_rejected_B.any():
            # The token that a later step draws comes earlier than its launch supposed.
            moved_R = rows_B[num_rejected_B > 0]
            moved_R = moved_R[self.num_computed_tokens[moved_R] >= self.num_tokens[moved_R]]
            self.token_ids[moved_R, self.num_computed_tokens[moved_R]] = -1 - moved_R

    def has_unknown_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return as Sequence.has_unknown_length, bool [rows]."""
        unknown: np.ndarray = self.num_computed_tokens[rows] > self.num_tokens[rows]
        return unknown

    def launched(
        self,
        seqs: list[Sequence],
        rows: np.ndarray,
        num_new_tokens: np.ndarray,
        num_logits: np.ndarray,
    ) -> None:
        """Enter a launch: each of `seqs` computes `num_new_tokens` tokens and gets `num_logits` pending tokens."""
        ends = self.num_computed_tokens[rows] + num_new_tokens
        self.num_computed_tokens[rows] = ends
        for seq, end, drawn in zip(seqs, ends.tolist(), num_logits.tolist(), strict=True):
            seq.num_computed_tokens = end
            seq.num_pending += drawn
            seq.draft_token_ids = seq.coming_drafts = ()
        draws = num_logits > 0
        drawing = rows[draws]
        self.token_ids[drawing, ends[draws]] = -1 - drawing
