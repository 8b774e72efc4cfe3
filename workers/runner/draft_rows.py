"""Where the rows of a step's sequences lie for a draft model: which token follows each row, and where drafts begin.

T rows (padding included), L rows with logits, S sequences with new tokens, K most drafts of one. Knows no model.
"""

from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch

from workers.step.forward_batch import ForwardBatch
from workers.step.scheduled_batch import NEVER_DRAWN, ScheduledBatch
from workers.step.step_output import counts_of

IN_SEQUENCE = -1
"""In place of a draw: the token of the next row follows."""

_capacity = attrgetter("capacity")


@dataclass(frozen=True)
class LastRows:
    """The last row of each sequence with new tokens, behind which its drafts follow.

    seqs       indices in the ScheduledBatch
    logits     indices among the rows with logits
    rows       rows of the forward
    table      rows of the InputBatch
    positions  of the states
    ends       positions that the sequence has memory for
    deltas     of the rotary embedding, see SequenceImages
    """

    seqs: np.ndarray
    logits: np.ndarray
    rows: np.ndarray
    table: np.ndarray
    positions: np.ndarray
    ends: np.ndarray
    deltas: np.ndarray


@dataclass(frozen=True)
class DraftRows:
    """The rows with logits of each sequence with new tokens, before it is known how many of its draws count.

    num_logits     rows with logits, the first one of which is:
    logits         among all rows with logits
    rows           of the forward
    positions      of its token
    seqs, table, ends, deltas   as LastRows
    """

    seqs: np.ndarray
    num_logits: np.ndarray
    logits: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    table: np.ndarray
    ends: np.ndarray
    deltas: np.ndarray

    @classmethod
    def of(cls, scheduled: ScheduledBatch, batch: ForwardBatch, limit: int) -> "DraftRows":
        """Return those of a step; no position may be `limit` or more."""
        seqs = scheduled.drawing_seqs
        num_logits = scheduled.num_logits[seqs]
        found = scheduled.seqs
        if len(seqs) < len(found):
            found = [found[index] for index in seqs.tolist()]
        ends = np.fromiter(map(_capacity, found), np.int64, len(found))
        return cls(
            seqs=seqs,
            num_logits=num_logits,
            logits=scheduled.first_logits,
            rows=batch.query_start_loc_cpu[seqs + 1] - num_logits,
            positions=batch.seq_lens_cpu[seqs] - num_logits,
            table=scheduled.rows[seqs],
            ends=np.minimum(ends, limit),
            deltas=np.fromiter((seq.rope_delta for seq in found), np.int64, len(found)),
        )

    def last(self, counts_S: np.ndarray) -> LastRows:
        """Return the last rows, where `counts_S` draws of each sequence count."""
        behind = counts_S - 1
        return LastRows(
            seqs=self.seqs,
            logits=self.logits + behind,
            rows=self.rows + behind,
            table=self.table,
            positions=self.positions + behind,
            ends=self.ends,
            deltas=self.deltas,
        )

    def num_drafts(self, counts_S: np.ndarray, depth: int) -> np.ndarray:
        """Return how many tokens `depth` passes draft of each sequence, int64 [S]; counts_S as in `last`.

        A draft behind the first needs memory for its K and V.
        """
        left_S = self.ends - (self.positions + counts_S - 1)
        found: np.ndarray = np.minimum(left_S.clip(min=1), depth)
        return found

    def counts(
        self, scheduled: ScheduledBatch, drawn_L: np.ndarray, counts_B: np.ndarray | None
    ) -> np.ndarray:
        """Return how many draws of each sequence count, int64 [S].

        drawn     int64; of `scheduled` the drafts are tokens
        counts_B  as in DraftPasses.run
        """
        counts: np.ndarray = counts_of(scheduled, drawn_L, counts_B)[self.seqs]
        return counts

    def drafts(self, scheduled: ScheduledBatch, width: int) -> np.ndarray:
        """Return the drafts that the draws of each sequence verify, or their references, int64 [S, width].

        Behind the last one is NEVER_DRAWN.
        """
        drafts_SK = np.full((len(self.seqs), width), NEVER_DRAWN)
        if scheduled.draft_token_ids is not None:
            seq_L = np.repeat(np.arange(len(self.seqs)), self.num_logits)
            place_L = scheduled.logits_places
            inside_L = place_L < width
            drafts_SK[seq_L[inside_L], place_L[inside_L]] = scheduled.compared_drafts[inside_L]
        return drafts_SK


def following(scheduled: ScheduledBatch, batch: ForwardBatch, num_rows: int) -> np.ndarray:
    """Return where the token that follows each row comes from, int64 [num_rows], for `next_tokens`.

    0 and more: the draw of the row with logits of this number; IN_SEQUENCE; less: -2 - token, of a prompt that goes on.
    """
    follow_T = np.full(num_rows, IN_SEQUENCE)
    ends = batch.query_start_loc_cpu[1:]
    rows_L = ends[scheduled.logits_seqs] - 1 - scheduled.logits_behind
    follow_T[rows_L] = np.arange(len(rows_L))
    prompts = np.flatnonzero(scheduled.num_logits == 0)
    lengths = batch.seq_lens_cpu[prompts].tolist()
    tokens = [
        scheduled.seqs[seq].token_ids[length]
        for seq, length in zip(prompts.tolist(), lengths, strict=True)
    ]
    follow_T[ends[prompts] - 1] = -2 - np.array(tokens, dtype=np.int64)
    return follow_T


def next_tokens(
    input_ids_T: torch.Tensor, follow_T: torch.Tensor, drawn_L: torch.Tensor
) -> torch.Tensor:
    """Return the token that follows each row, int64 [T]; of padding rows any token.

    follow   of `following`
    drawn    at least one; negative where no token could be drawn
    """
    drawn_T = drawn_L.index_select(0, follow_T.clamp(min=0))
    known_T = torch.where(follow_T == IN_SEQUENCE, input_ids_T.roll(-1), -2 - follow_T)
    return torch.where(follow_T >= 0, drawn_T, known_T).clamp_(min=0)


def following_batch(
    batch: ForwardBatch, next_ids_T: torch.Tensor, follow_T: torch.Tensor
) -> ForwardBatch:
    """Return the batch with the tokens that follow its rows in the place of theirs, and the images among them.

    The token behind the last row of a part of a prompt may be of an image that is not in the batch: it keeps its id.

    next_ids   of `next_tokens`
    follow     of `following`
    """
    mask_T, embeds_TXD = batch.image_mask, batch.image_embeds
    if mask_T is None or embeds_TXD is None:
        return replace(batch, input_ids=next_ids_T)
    return replace(
        batch,
        input_ids=next_ids_T,
        image_mask=mask_T.roll(-1) * (follow_T == IN_SEQUENCE),
        image_embeds=embeds_TXD[:, :1].roll(-1, 0),
    )
